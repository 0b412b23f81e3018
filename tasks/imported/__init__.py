"""Problems of a log that another tool wrote."""
