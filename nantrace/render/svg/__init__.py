"""The pictures of a page as SVG by hand: small, in the page's own colours, and without any library."""
