"""All plots of the laboratory, as PNG files. One module per kind of plot; `canvas` is what they share."""
