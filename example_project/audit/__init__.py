"""Who did what, for the auditor."""
