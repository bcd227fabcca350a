"""Operations: what one client asked of one model: typed, numbered, fingerprinted, remembered. Pure."""
