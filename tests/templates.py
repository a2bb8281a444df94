"""Chat templates of the common families, written from their public formats, each with a tiny tokenizer of its own.

tokenizer = FAMILIES["qwen3"].tokenizer()
"""

from dataclasses import dataclass
from types import SimpleNamespace

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from models.chat import end_of_turn_ids
from tiny import CHATML, SPECIAL, tiny_pieces, tiny_tokenizer

# A system message of its own in front of everything, with a date; roles between headers; tools go into the first
# question, a call is the answer's whole content, and a result comes from "ipython".
LLAMA31 = """
{{- bos_token }}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n' }}
{{- 'Today Date: ' + strftime_now('%d %b %Y') + '\n\n' + system + '<|eot_id|>' }}
{%- for m in messages %}
    {%- set role = 'ipython' if m.role == 'tool' else m.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
    {%- if tools and loop.first %}
        {{- 'You may call these functions.\n\n' }}
        {%- for tool in tools %}{{- tool | tojson + '\n\n' }}{% endfor %}
    {%- endif %}
    {%- if m.tool_calls %}
        {%- set call = m.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
    {%- elif m.role == 'tool' %}
        {{- m.content | tojson }}
    {%- else %}
        {{- m.content | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""
LLAMA3 = """
{%- for m in messages %}
    {%- if loop.first %}{{- bos_token }}{% endif %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""
# ChatML with a system prompt of its own; results of tools are a user's turn.
QWEN_SYSTEM = """
{%- set first = messages[0].content if messages[0].role == 'system' else DEFAULT %}
{%- if first or tools %}
    {{- '<|im_start|>system\n' + first }}
    {%- if tools %}
        {{- '\n\n# Tools\n<tools>' }}
        {%- for tool in tools %}{{- '\n' + tool | tojson }}{% endfor %}
        {{- '\n</tools>' }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
"""
QWEN_CALLS = """
        {%- for call in m.tool_calls or [] %}
            {{- '\n' if m.content or not loop.first }}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
"""
QWEN_RESULTS = """
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' }}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
    {%- endif %}
{%- endfor %}
"""
QWEN25 = (
    QWEN_SYSTEM.replace("DEFAULT", "'You are Qwen.'")
    + """
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + (m.content or '') }}
"""
    + QWEN_CALLS
    + "{{- '<|im_end|>\n' }}"
    + QWEN_RESULTS
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"
)
# No system prompt of its own. Thinking is kept after the last question alone, where an answer without any is given an
# empty thought, which is the prompt's where thinking is off.
QWEN3 = (
    QWEN_SYSTEM.replace("DEFAULT", "''")
    + """
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content or '' %}
        {%- set thought = m.reasoning_content or '' %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
"""
    + QWEN_CALLS
    + "{{- '<|im_end|>\n' }}"
    + QWEN_RESULTS
    + """
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""
)
ALTERNATES = """
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
{%- endfor %}
"""
# The headers are ordinary text; the system prompt is merged into the first question; an answer begins with a space.
MISTRAL = (
    """
{%- set system = '' %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}
{%- endif %}
"""
    + ALTERNATES
    + """
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '[INST] ' + (system if loop.first else '') + m.content + ' [/INST]' }}
    {%- else %}{{- ' ' + m.content + eos_token }}{% endif %}
{%- endfor %}
"""
)
# The headers are tokens; system prompt and tools are written into the last question, if nothing was answered after it.
MISTRAL3 = """
{%- set system = '' %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}
{%- endif %}
{{- bos_token }}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.index0 == ns.last %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (system if loop.last else '') + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {%- set call = m.tool_calls[0].function %}
        {{- '[TOOL_CALLS] [{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}]' + eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content | tojson + '}[/TOOL_RESULTS]' }}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""
GEMMA = (
    """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{% endif %}
"""
    + ALTERNATES
    + """
{%- for m in messages %}
    {%- set role = 'model' if m.role == 'assistant' else m.role %}
    {{- '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}
"""
)
# What stands after the last turn, when no answer is asked for, would end one as well.
PHI3 = """
{%- for m in messages %}{{- '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{% else %}{{- eos_token }}{% endif %}
"""
PHI4 = """
{%- for m in messages %}{{- '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_sep|>' }}{% endif %}
"""
# Thinking is cut out of every answer, the last one too; a prompt opens the thought.
DEEPSEEK = """
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- m.content }}
    {%- elif m.role == 'user' %}{{- '<｜User｜>' + m.content }}
    {%- elif m.role == 'assistant' %}{{- '<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\n' }}{% endif %}
"""
GENERATION = """
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' %}{% generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}{{- m.content + '<|im_end|>' }}{% endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""
TRAILING = """
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n--- end ---\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""


@dataclass(frozen=True)
class Family:
    """A template and what its tokenizer must have.

    lead, end: what an answer has around its content.  header: what stands before an answer that is not there yet.
    eos: tokens that end an answer beside the template's own. prepend: None for byte-level BPE, else where a
    SentencePiece-like tokenizer puts a space before its text.
    """

    template: str
    special: tuple[str, ...]
    header: str
    end: str
    eos: str
    bos: str | None = None
    lead: str = ""
    system: bool = True
    tools: bool = False
    stable: bool = True
    thinks: bool = False
    rstrip: bool = False
    prepend: str | None = None

    def tokenizer(self) -> PreTrainedTokenizerFast:
        if self.prepend is not None:
            return tiny_pieces(self.template, self.special, self.prepend)
        tokenizer = tiny_tokenizer(512, self.template, self.special, self.bos, self.eos)
        if self.rstrip:
            tokenizer.add_tokens([AddedToken(t, rstrip=True, special=True) for t in self.special], special_tokens=True)
        return tokenizer

    def verifier(self):
        """What `to_documents` needs of one."""
        tokenizer = self.tokenizer()
        ends = tuple(sorted(set(end_of_turn_ids(tokenizer))))
        return SimpleNamespace(tokenizer=tokenizer, eos_ids=ends, vocab_size=len(tokenizer), name="tiny")


LLAMA_SPECIAL = ("<|end_of_text|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
LLAMA_WORDS = {
    "special": LLAMA_SPECIAL,
    "bos": "<|begin_of_text|>",
    "header": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "end": "<|eot_id|>",
    "eos": "<|eot_id|>",
}
CHATML_WORDS = {"special": SPECIAL, "header": "<|im_start|>assistant\n", "end": "<|im_end|>", "eos": "<|im_end|>"}
QWEN_SPECIAL = (*SPECIAL, "<think>", "</think>", "<tool_call>", "</tool_call>")
MISTRAL_WORDS = {"special": ("<unk>", "<s>", "</s>"), "bos": "<s>", "lead": " ", "end": "</s>", "eos": "</s>"}
MISTRAL_TOKENS = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
MISTRAL_TOKENS += ("[TOOL_RESULTS]", "[/TOOL_RESULTS]")
DEEPSEEK_SPECIAL = ("<pad>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
FAMILIES = {
    "llama3": Family(LLAMA3, **LLAMA_WORDS),
    "llama31": Family(LLAMA31, **LLAMA_WORDS, tools=True),
    "qwen25": Family(QWEN25, **CHATML_WORDS | {"special": QWEN_SPECIAL}, tools=True),
    "qwen3": Family(QWEN3, **CHATML_WORDS | {"special": QWEN_SPECIAL}, tools=True, stable=False, thinks=True),
    "mistral": Family(MISTRAL, **MISTRAL_WORDS, header=" [/INST]", prepend="always"),
    "mistral_first": Family(MISTRAL, **MISTRAL_WORDS, header=" [/INST]", prepend="first"),
    "mistral3": Family(
        MISTRAL3,
        **MISTRAL_WORDS | {"special": (*MISTRAL_WORDS["special"], *MISTRAL_TOKENS)},
        header="[/INST]",
        tools=True,
    ),
    "gemma": Family(
        GEMMA,
        ("<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        header="<start_of_turn>model\n",
        end="<end_of_turn>",
        bos="<bos>",
        eos="<eos>",
        system=False,
    ),
    "phi3": Family(
        PHI3,
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        header="<|assistant|>\n",
        end="<|end|>",
        eos="<|endoftext|>",
        rstrip=True,
    ),
    "phi4": Family(
        PHI4,
        (*SPECIAL, "<|im_sep|>"),
        header="<|im_start|>assistant<|im_sep|>",
        end="<|im_end|>",
        eos="<|im_end|>",
    ),
    "chatml": Family(CHATML, **CHATML_WORDS, bos="<|im_start|>"),
    "deepseek": Family(
        DEEPSEEK,
        DEEPSEEK_SPECIAL,
        header="<｜Assistant｜><think>\n",
        end="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        stable=False,
        thinks=True,
    ),
    "generation": Family(GENERATION, **CHATML_WORDS),
    "trailing": Family(TRAILING, **CHATML_WORDS),
}
