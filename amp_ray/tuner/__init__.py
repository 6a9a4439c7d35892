"""The tuner: a study folds over outcomes; nothing here waits, launches or draws by chance."""
