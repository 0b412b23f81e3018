"""Problems of a log from another tool."""
