"""Operations: pure forward and backward functions that a chain runs."""
