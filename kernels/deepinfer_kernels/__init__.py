"""Operations of DeepSeek-V4.1-Flash whose rows do not depend on the batch they sit in."""
