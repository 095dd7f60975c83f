# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project


def register_colbert_query_embedding_processor():
    return "colbert_query_processor.query_embedding_processor.ColBERTQueryEmbeddingProcessor"  # noqa: E501
