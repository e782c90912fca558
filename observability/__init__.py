"""What an operator loads: a dashboard, rules, and how they are made."""
