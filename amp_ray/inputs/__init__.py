"""From files to values: experiments, strategies and profiles, with messages that name a place."""
