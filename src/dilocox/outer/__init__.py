"""Between sites: coordinator, exchange, overlap rule and outer optimizer."""
