"""The paper's theory as code whose statements are tests."""
