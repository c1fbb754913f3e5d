"""What is computed: operations as pure functions of their arguments."""
