"""Questions, verifiers and games of other people's packages."""
