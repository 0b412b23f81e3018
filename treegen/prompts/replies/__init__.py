"""A model's reply, split into its thoughts, its text and the tool calls in it.

replies.py         a completion, or a sample while it grows, as a Reply
parser.py          the parts of a text as it grows; the same for whole texts and for streams
formats.py         the table of formats of tool calls, and the marks that identify a format
readers.py         readers of calls as JSON, between tags, or in Python
call_grammars.py   grammars that force a reply to call a tool
scan.py            a position in a text that may still grow
arguments.py       arguments that are written as text, converted to the types that a tool declares
types.py           ToolCall, Reply and the parts of a stream
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
