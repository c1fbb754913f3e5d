"""The basic operations, all on the split API."""
