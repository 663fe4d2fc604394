"""Files of a folder, or objects under a URL, as a source: each new file once, row by row."""
