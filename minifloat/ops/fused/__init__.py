"""Operations that compute several basic ones together, and the table that says when."""
