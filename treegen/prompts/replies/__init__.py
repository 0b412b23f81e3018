"""What a model has said, taken apart: its thoughts, its text and the tool calls in it.

replies.py    a completion, or a sample while it grows, as a Reply
parser.py     the parts of a text as it grows; one way for whole texts and for streams
formats.py    the table: how models write tool calls, and by what a model is known to write so
readers.py    the kinds of calls that the table is made of: JSON, tags, Python
marked.py     those with marks of their own: Gemma, Harmony
scan.py       a place in a text that may still grow
arguments.py  arguments that are written as text, by the types that a tool declares
types.py      ToolCall, Reply and the parts of a stream
"""

from treegen.prompts.replies.formats import TOOL_FORMATS as TOOL_FORMATS
from treegen.prompts.replies.formats import ToolFormat as ToolFormat
from treegen.prompts.replies.formats import tool_format_of as tool_format_of
from treegen.prompts.replies.replies import ReplyReader as ReplyReader
from treegen.prompts.replies.types import Part as Part
from treegen.prompts.replies.types import ReasoningPart as ReasoningPart
from treegen.prompts.replies.types import Reply as Reply
from treegen.prompts.replies.types import TextPart as TextPart
from treegen.prompts.replies.types import ToolCall as ToolCall
