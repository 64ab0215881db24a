"""What a language model is trained from."""

from __future__ import annotations

from dataclasses import dataclass

from farflung.tables import AFTER_RESUME, BETWEEN_MACHINES, BETWEEN_PEERS, Checked, setting


@dataclass(frozen=True)
class LanguageSettings(Checked):
    """The language model, and the text or chats that it is trained on."""

    model: str = setting("tiny", may_differ=BETWEEN_PEERS)
    """A preset (micro, tiny, small, llama-125m, llama-1.3b, llama-6.8b), or anything that AutoConfig loads."""
    pretrained: bool = False
    """Start from the model's published weights instead of random ones."""
    lora: int = setting(0, least=0)
    """Train adapters of this rank (LoRA), and leave the published weights as they are; 0 trains the weights."""
    lora_modules: str = ""
    """The layers that get adapters, such as q_proj,v_proj; unset: all linear layers but the head."""
    base: str = ""
    """Hash of the weights that adapters belong to. farflung fills it in, and refuses machines with other weights."""
    data: str = setting("stdlib", may_differ=BETWEEN_MACHINES | BETWEEN_PEERS)
    """stdlib, hf:NAME (hub), a path, glob or address of text, rows or chats, or a store; several: '0.7*A + 0.3*B'."""
    validation: str | None = setting(None, may_differ=BETWEEN_MACHINES | BETWEEN_PEERS)
    """What to judge the model by, as for data; unset: documents of the data, one in twenty, that are held out."""
    tokenizer: str | None = setting(None, may_differ=BETWEEN_MACHINES | BETWEEN_PEERS)
    """bytes, or anything that AutoTokenizer loads; unset: the model's own, or bytes for a preset."""
    force_tokenizer: bool = setting(False, may_differ=AFTER_RESUME)
    """Train published weights with a tokenizer that is not theirs, so that each token means other text than before."""
    text_column: str = setting("text", may_differ=BETWEEN_PEERS)
    """The column of JSON Lines, CSV, Parquet and hub data that holds the text."""
    max_tokens: int | None = setting(None, least=1000, may_differ=BETWEEN_PEERS)
    """Read at most this many tokens of the data; unset: all."""
    data_room: float = setting(20.0, above=0, may_differ=AFTER_RESUME | BETWEEN_MACHINES | BETWEEN_PEERS)
    """Keep at most this many GB of tokens of data from other machines, which is read file by file."""
    data_deadline: float = setting(300.0, above=0, may_differ=AFTER_RESUME | BETWEEN_MACHINES | BETWEEN_PEERS)
    """Seconds to ask again for such data where it cannot be read, before the run stops, with a checkpoint."""
    sequence_length: int = setting(128, least=2)
    """Tokens in one training sequence."""
    document_mask: bool = False
    """Keep attention within a document where a sequence has parts of several, as some models can."""
    eval_sequences: int = setting(64, least=1)
    """Held-out sequences that a validation loss is measured on."""

    def settled(self) -> LanguageSettings:
        """With the hash of the base, where adapters are trained. Raises UserError."""
        from farflung.workloads.language import Language  # which needs these settings

        return Language(self).settled()
