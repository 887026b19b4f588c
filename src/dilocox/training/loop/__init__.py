"""Training whose inner steps are taken by a loop of the user's own (`dilocox.site`)."""
