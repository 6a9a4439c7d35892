"""Description of trials without running them: launch commands, outcomes and their parsing."""
