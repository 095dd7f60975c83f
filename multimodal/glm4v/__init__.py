"""GLM-4.1V and GLM-4.6V-Flash: a tower with learned positions sampled bicubically, and a gated merger."""
