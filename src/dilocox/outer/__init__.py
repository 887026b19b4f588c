"""Mathematics between sites: contributions, their average, outer optimizer and overlap rule."""
