"""The planner of AMP (2022), restated from its paper and artifact."""
