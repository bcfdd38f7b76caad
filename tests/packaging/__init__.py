"""What a reader or a package index gets: the site of docs/, the README, sdist and wheel."""
