"""A decoder layer of few rows in six launches: products that norm, activate and add; attention that also stores."""
