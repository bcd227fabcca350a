BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0001');
CREATE TABLE checkpoints (
	run_id VARCHAR NOT NULL, 
	kind VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	attempt VARCHAR NOT NULL, 
	folder VARCHAR NOT NULL, 
	position BIGINT NOT NULL, 
	size_bytes BIGINT NOT NULL, 
	digest VARCHAR NOT NULL, 
	created_s DOUBLE NOT NULL, 
	expires_s DOUBLE, 
	unnamed BOOLEAN NOT NULL, 
	spec JSON NOT NULL, 
	user_metadata JSON NOT NULL, 
	PRIMARY KEY (run_id, kind, name)
);
INSERT INTO "checkpoints" VALUES('5e551011-0000-4000-8000-000000000001:train:0','weights','step 1','0123456789abcdef','/data/checkpoints/run/weights/step/0123456789abcdef',3,8589934592,'sha256:00',1790000050.0,1890000000.0,0,'{"base_model": "tiny", "lora_rank": "8"}','{"k": "v"}');
CREATE TABLE keys (
	key_id VARCHAR NOT NULL, 
	name VARCHAR NOT NULL, 
	digest VARCHAR NOT NULL, 
	created_s DOUBLE NOT NULL, 
	revoked_s DOUBLE, 
	PRIMARY KEY (key_id), 
	UNIQUE (digest)
);
INSERT INTO "keys" VALUES('ab12cd34','ann','3e13af13cfd914b1cf898e2e201ba7dfdfe696e4b7354d282cfde6ace251457c',1789999999.0,NULL);
CREATE TABLE runs (
	run_id VARCHAR NOT NULL, 
	session_id VARCHAR NOT NULL, 
	base_model VARCHAR NOT NULL, 
	lora_rank INTEGER NOT NULL, 
	alpha DOUBLE NOT NULL, 
	seed BIGINT, 
	train_attn BOOLEAN NOT NULL, 
	train_mlp BOOLEAN NOT NULL, 
	train_unembed BOOLEAN NOT NULL, 
	source VARCHAR, 
	user_metadata JSON NOT NULL, 
	created_s DOUBLE NOT NULL, 
	last_request_s DOUBLE NOT NULL, 
	ended_s DOUBLE, 
	end_reason VARCHAR, 
	PRIMARY KEY (run_id)
);
INSERT INTO "runs" VALUES('5e551011-0000-4000-8000-000000000001:train:0','5e551011-0000-4000-8000-000000000001','tiny',8,16.0,1099511627776,1,0,1,NULL,'{}',1790000010.0,1790000090.0,NULL,NULL);
CREATE TABLE sampling_sessions (
	sampling_session_id VARCHAR NOT NULL, 
	session_id VARCHAR NOT NULL, 
	base_model VARCHAR NOT NULL, 
	checkpoint VARCHAR, 
	attempt VARCHAR, 
	moving BOOLEAN NOT NULL, 
	created_s DOUBLE NOT NULL, 
	PRIMARY KEY (sampling_session_id)
);
INSERT INTO "sampling_sessions" VALUES('5e551011-0000-4000-8000-000000000001:sample:0','5e551011-0000-4000-8000-000000000001','tiny','tinker://5e551011-0000-4000-8000-000000000001:train:0/sampler_weights/inflight-00000002','fedcba9876543210',1,1790000060.0);
CREATE TABLE sessions (
	session_id VARCHAR NOT NULL, 
	created_s DOUBLE NOT NULL, 
	last_seen_s DOUBLE NOT NULL, 
	ended_s DOUBLE, 
	end_reason VARCHAR, 
	sdk_version VARCHAR NOT NULL, 
	display_name VARCHAR, 
	tags JSON NOT NULL, 
	user_metadata JSON NOT NULL, 
	PRIMARY KEY (session_id)
);
INSERT INTO "sessions" VALUES('5e551011-0000-4000-8000-000000000001',1790000000.25,1790000100.5,NULL,NULL,'0.38.0','été 1','["a", "b"]','{"note": "quotes \" and \u2014"}');
CREATE INDEX ix_runs_session_id ON runs (session_id);
CREATE INDEX ix_checkpoints_expires_s ON checkpoints (expires_s);
CREATE INDEX ix_checkpoints_created_s ON checkpoints (created_s);
CREATE INDEX ix_sampling_sessions_session_id ON sampling_sessions (session_id);
COMMIT;
