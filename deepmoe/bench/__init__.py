"""Speed, as figures and ratios measured side by side in one run."""
