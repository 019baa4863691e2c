"""From a trace of modules to a verdict: who gave whom its nonfinite values, and in which call they were born."""
