"""Ways to make links between ranks; `base` states what each of them offers. And memory that ranks share."""
