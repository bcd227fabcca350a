"""The binary messages of the protocol: our .proto file and the code generated from it."""
