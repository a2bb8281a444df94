"""Pure torch: verifier adapter, layers, heads, losses, vocabulary map, export. Imports nothing of ours.

Axis letters, as name suffixes, everywhere in this repository:

    B batch rows     T tokens            D hidden size          A captured layers
    V verifier vocabulary                R draft (reduced) vocabulary
    K draft step     N draft-tree nodes  P anchors = supervised label rows
    H attention heads  C cache slots     F head_dim

`p_target` is the verifier's next-token law and `q_draft` the draft's, as in Leviathan et al. (2211.17192).
"""
