"""Where training frameworks plug in; each module imports its host only when it is used."""
