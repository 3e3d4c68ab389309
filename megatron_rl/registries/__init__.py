"""Holds what can be registered beside losses and aggregations: KL estimators and corrections. It imports no torch by itself."""
