"""The command ``dynamiq``, one module per subcommand."""
