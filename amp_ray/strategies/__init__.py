"""How it is trained: candidates and strategies, with the options of their stages."""
