"""The data plane: JSON rows -> validated, templated, tokenised Arrow blocks, made once by Ray Data and fed to a trainer."""
