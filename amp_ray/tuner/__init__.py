"""The tuner: a pure fold over outcomes, without waiting, launching or randomness."""
