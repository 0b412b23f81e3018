"""MATH and MATH-500: competition problems whose answers are expressions."""
