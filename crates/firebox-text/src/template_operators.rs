//! Limits on operators of templates: filters inserted into a template's source.

use crate::error::TextError;
use crate::template_generation_tag::{name, renamed};
use crate::verbatim::verbatim_len;
use std::ops::Range;

/// The filter that passes a value unless it is too large.
pub(crate) const FIT: &str = "__fit";

/// Like [`FIT`], for an operand of `~`, which is converted to text.
pub(crate) const TEXT: &str = "__text";

/// The filter around the value that a loop iterates over.
pub(crate) const EACH: &str = "__each";

/// The filter around a value assigned to a variable.
pub(crate) const KEPT: &str = "__kept";

/// The filter around a value assigned to an attribute of a namespace.
pub(crate) const STORED: &str = "__stored";

/// The longest source of a template. Templates in use take less than a tenth of this.
const MAX_SOURCE_BYTES: usize = 256 << 10;
/// The most tokens between brackets and the most `elif` branches. The engine's parser, and the drop of its tree, recurse once per operator and once per `elif`.
const MAX_CHAIN_TOKENS: usize = 8_000;
const MAX_ELIFS: usize = 1_000;

/// Inserts the filter [`FIT`] around operands and results of every `~`, `+` and `*`, [`EACH`] around values that loops iterate
/// over, and [`KEPT`] or [`STORED`] around assigned values. [Renames](renamed) what the engine has by other names.
///
/// minijinja has no hook for operators, and concatenation can build strings without a limit. The filter is appended to an
/// operand, where it binds tighter than any operator, or follows brackets around a whole chain of operators, so the meaning
/// stays the same. Line numbers do not change.
pub(crate) fn guarded(source: &str) -> Result<String, TextError> {
    let invalid = |reason: &str| TextError::InvalidChatTemplate { reason: reason.to_owned() };
    if source.len() > MAX_SOURCE_BYTES {
        return Err(invalid("it is longer than 256 KiB"));
    }
    let mut edits = Vec::new();
    let mut elifs = 0;
    let mut at = 0;
    while let Some(found) = source[at..].find('{') {
        let start = at + found;
        let rest = &source[start..];
        at = start + 1;
        if let Some(length) = verbatim_len(rest) {
            at = start + length;
        } else if rest.starts_with("{{") || rest.starts_with("{%") {
            let mut tag = Tag::new(source, start + 2, &mut edits);
            let (end, tokens) = tag.scan(if rest.starts_with("{{") { "}}" } else { "%}" });
            if tokens > MAX_CHAIN_TOKENS {
                return Err(invalid("one of its tags has more than 8000 words and signs"));
            }
            at = end;
            let tag = &source[start..end];
            if let Some((place, name)) = renamed(tag) {
                edits.push((start + place.start..start + place.end, name));
            }
            elifs += usize::from(name(tag).starts_with("elif"));
        }
    }
    if elifs > MAX_ELIFS {
        return Err(invalid("it has more than 1000 `elif`"));
    }
    edits.sort_by_key(|(place, _)| place.start);
    let mut text = String::with_capacity(source.len() + edits.len() * 8);
    let mut copied = 0;
    for (place, new) in edits {
        text.push_str(&source[copied..place.start]);
        text.push_str(new);
        copied = place.end;
    }
    text.push_str(&source[copied..]);
    Ok(text)
}

/// Text to insert, by position.
type Edit = (Range<usize>, &'static str);

/// The role of the next word.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Link {
    #[default]
    Nothing,
    /// The name of an attribute or a filter.
    Name,
    /// The name of a test.
    Test,
    /// Possibly the argument of a test, which needs no brackets.
    Argument,
}

/// The chain of operators being read between one pair of brackets.
#[derive(Clone, Copy, Default)]
struct Chain {
    start: Option<usize>,
    /// The start of the factors of the current product.
    term: Option<usize>,
    has_operand: bool,
    concatenates: bool,
    multiplies: bool,
    term_multiplies: bool,
    /// The operator before the current term, if any.
    before: Option<char>,
    link: Link,
}

/// The use of a value in a tag.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Iterates over it.
    For,
    /// Assigns it.
    Set,
    /// Assigns it, and possibly others, within a scope.
    With,
    Other,
}

/// The position of that value.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Held {
    /// There is none, or it has been handled.
    Nothing,
    /// Behind `in` or `=`.
    Wanted,
    /// It begins here.
    From(usize),
    /// The filtered text up to `endset`.
    Filtered,
}

struct Tag<'a> {
    source: &'a str,
    at: usize,
    /// End of the previous token.
    behind: usize,
    outer: Vec<Chain>,
    chain: Chain,
    kind: Kind,
    held: Held,
    /// Whether the target of the assignment is an attribute.
    dotted: bool,
    edits: &'a mut Vec<Edit>,
}

impl<'a> Tag<'a> {
    fn new(source: &'a str, at: usize, edits: &'a mut Vec<Edit>) -> Self {
        let at = at + usize::from(source[at..].starts_with(['-', '+']));
        let inside = source[at..].trim_start();
        let end = inside.find(|c: char| !is_word(c)).unwrap_or(inside.len());
        let kind = match &inside[..end] {
            "for" => Kind::For,
            "set" => Kind::Set,
            "with" | "generation" => Kind::With,
            _ => Kind::Other,
        };
        let held = if kind == Kind::Other { Held::Nothing } else { Held::Wanted };
        let outer = Vec::new();
        Self { source, at, behind: at, outer, chain: Chain::default(), kind, held, dotted: false, edits }
    }

    /// Reads up to the closing bracket. Returns the position behind it and the number of tokens.
    fn scan(&mut self, closing: &str) -> (usize, usize) {
        let mut tokens = 0;
        loop {
            let rest = &self.source[self.at..];
            let Some(first) = rest.chars().next() else { break };
            if first.is_whitespace() {
                self.at += first.len_utf8();
                continue;
            }
            let unmarked = rest.strip_prefix(['-', '+']).unwrap_or(rest);
            if self.outer.is_empty() && (unmarked.starts_with(closing) || rest.starts_with(closing)) {
                self.end_chain();
                self.end_held();
                let mark = usize::from(!rest.starts_with(closing));
                return (self.at + mark + closing.len(), tokens);
            }
            tokens += 1;
            let length = self.token(rest, first);
            self.at += length;
            self.behind = self.at;
        }
        (self.source.len(), tokens)
    }

    /// Reads one token and returns its length.
    fn token(&mut self, rest: &str, first: char) -> usize {
        match first {
            '\'' | '"' => {
                self.operand();
                let mut escaped = false;
                let end = rest.char_indices().skip(1).find(|&(_, character)| {
                    let ends = character == first && !escaped;
                    escaped = character == '\\' && !escaped;
                    ends
                });
                end.map_or(rest.len(), |(position, _)| position + 1)
            }
            '0'..='9' => {
                self.operand();
                let mut length = 0;
                let bytes = rest.as_bytes();
                while let Some(byte) = bytes.get(length) {
                    let fraction = *byte == b'.' && bytes.get(length + 1).is_some_and(u8::is_ascii_digit);
                    if !(byte.is_ascii_alphanumeric() || *byte == b'_' || fraction) {
                        break;
                    }
                    length += 1;
                }
                length
            }
            _ if first.is_alphabetic() || first == '_' => {
                let end = rest.find(|c: char| !is_word(c)).unwrap_or(rest.len());
                self.word(&rest[..end]);
                end
            }
            '(' | '[' | '{' => {
                match self.chain.has_operand {
                    true => self.chain.link = Link::Nothing,
                    false => self.operand(),
                }
                self.outer.push(std::mem::take(&mut self.chain));
                1
            }
            ')' | ']' | '}' => {
                self.end_chain();
                self.chain = self.outer.pop().unwrap_or_default();
                1
            }
            '.' | '|' => {
                if self.kind == Kind::Set && self.held == Held::Wanted {
                    self.dotted |= first == '.';
                    self.held = if first == '|' { Held::Filtered } else { Held::Wanted };
                }
                self.chain.link = Link::Name;
                1
            }
            '~' | '+' | '-' | '*' | '/' | '%' => {
                let double = rest.starts_with("**") || rest.starts_with("//");
                self.operator(if double { '/' } else { first });
                1 + usize::from(double)
            }
            _ => {
                self.end_chain();
                if ["==", "!=", ">=", "<="].iter().any(|sign| rest.starts_with(sign)) {
                    return 2;
                }
                if matches!(self.kind, Kind::Set | Kind::With) && self.outer.is_empty() {
                    self.assignment(first);
                }
                first.len_utf8()
            }
        }
    }

    /// Handles the sign before or behind an assigned value.
    fn assignment(&mut self, sign: char) {
        match (sign, self.held) {
            ('=', Held::Wanted) => self.held = Held::From(self.at + 1),
            (',', Held::From(_)) => {
                self.end_held();
                // A second value of the assignment, or the name of the next one.
                self.held = if self.kind == Kind::Set { Held::From(self.at + 1) } else { Held::Wanted };
            }
            _ => {}
        }
    }

    fn word(&mut self, word: &str) {
        match (self.chain.link, word) {
            (Link::Name, _) => self.chain.link = Link::Nothing,
            (Link::Test, "not") => {}
            (Link::Test, _) => self.chain.link = Link::Argument,
            (_, "is") if self.chain.has_operand => self.chain.link = Link::Test,
            (_, "and" | "or" | "not" | "if" | "else" | "in") => {
                self.end_chain();
                if self.kind == Kind::For && self.outer.is_empty() {
                    match (self.held, word) {
                        (Held::Wanted, "in") => self.held = Held::From(self.at + word.len()),
                        (Held::From(_), "if") => self.end_held(),
                        _ => {}
                    }
                }
            }
            (_, "recursive") if self.kind == Kind::For && self.chain.has_operand && self.outer.is_empty() => {
                self.end_chain();
                self.end_held();
            }
            _ => self.operand(),
        }
    }

    fn end_held(&mut self) {
        let filter = match (self.kind, self.dotted) {
            (Kind::For, _) => ")|__each",
            (_, true) => ")|__stored",
            _ => ")|__kept",
        };
        match std::mem::replace(&mut self.held, Held::Nothing) {
            Held::From(start) if start < self.behind => {
                self.insert(start, " (");
                self.insert(self.behind, filter);
            }
            Held::Filtered => self.insert(self.behind, filter.trim_start_matches(')')),
            _ => {}
        }
    }

    /// Handles a word, literal or bracket at the beginning of a value.
    fn operand(&mut self) {
        if self.chain.link == Link::Argument {
            self.chain.link = Link::Nothing;
            return;
        }
        if self.chain.has_operand {
            self.end_chain();
        }
        self.begin();
        self.chain.has_operand = true;
    }

    fn begin(&mut self) {
        let at = self.at;
        self.chain.start.get_or_insert(at);
        self.chain.term.get_or_insert(at);
    }

    fn operator(&mut self, sign: char) {
        if self.chain.link == Link::Argument && matches!(sign, '+' | '-') {
            return;
        }
        if !self.chain.has_operand {
            // A sign of a number, or `*` before arguments.
            if sign == '-' {
                self.begin();
            }
            return;
        }
        match sign {
            '~' | '+' | '-' => {
                self.chain.concatenates |= sign != '-';
                self.end_term(Some(sign));
                self.chain.before = Some(sign);
                self.chain.term = None;
            }
            '*' => {
                self.chain.multiplies = true;
                self.chain.term_multiplies = true;
            }
            _ => {}
        }
        self.chain.has_operand = false;
        self.chain.link = Link::Nothing;
    }

    /// Ends a term before an operator, if there is one.
    fn end_term(&mut self, after: Option<char>) {
        let signs = [self.chain.before, after];
        if self.chain.term_multiplies {
            self.wrap(self.chain.term);
        } else if signs.contains(&Some('~')) && signs.iter().flatten().all(|sign| *sign == '~') {
            self.insert(self.behind, "|__text");
        } else if self.chain.concatenates {
            self.insert(self.behind, "|__fit");
        }
        self.chain.term_multiplies = false;
    }

    fn end_chain(&mut self) {
        if self.chain.has_operand && (self.chain.concatenates || self.chain.multiplies) {
            self.end_term(None);
            if self.chain.concatenates {
                self.wrap(self.chain.start);
            }
        }
        self.chain = Chain::default();
    }

    fn insert(&mut self, at: usize, text: &'static str) {
        self.edits.push((at..at, text));
    }

    fn wrap(&mut self, start: Option<usize>) {
        let Some(start) = start else { return };
        self.insert(start, "(");
        self.insert(self.behind, ")|__fit");
    }
}

fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

#[cfg(test)]
mod tests {
    use super::{EACH, FIT, KEPT, STORED, TEXT, guarded};

    #[test]
    fn all_operands_and_results_are_guarded() {
        let cases = [
            ("{{ a ~ b }}", "{{ (a|T ~ b|T)|F }}"),
            ("{{ a ~ b + c ~ d }}", "{{ (a|T ~ b|F + c|F ~ d|T)|F }}"),
            ("{{- a+b -}}", "{{- (a|F+b|F)|F -}}"),
            ("{% if a ~ b is string and c %}", "{% if (a|T ~ b is string|T)|F and c %}"),
            (
                "{% set x = 'a~' * 3 + f(a ~ b, *c).d|e('x') %}",
                "{% set x = ( (('a~' * 3)|F + f((a|T ~ b|T)|F, *c).d|e('x')|F)|F)|K %}",
            ),
            ("{{ {'a': -b * 2} }}", "{{ {'a': (-b * 2)|F} }}"),
            (
                "a + b {# a ~ b #}{% raw %}{{ a ~ b }}{% endraw %}",
                "a + b {# a ~ b #}{% raw %}{{ a ~ b }}{% endraw %}",
            ),
            ("{%+ if a is divisibleby 3 +%}{{ a[1:] }}", "{%+ if a is divisibleby 3 +%}{{ a[1:] }}"),
            ("{{ a - 1 if b - c else d ~ '' }}", "{{ a - 1 if b - c else (d|T ~ ''|T)|F }}"),
            ("{%- for a in b -%}", "{%- for a in ( b)|E -%}"),
            ("{% for a, b in c.items() if d in e %}", "{% for a, b in ( c.items())|E if d in e %}"),
            ("{% for a in (b if c else []) recursive %}", "{% for a in ( (b if c else []))|E recursive %}"),
            ("{% for a in b + c %}{{ 1 in d }}", "{% for a in ( (b|F + c|F)|F)|E %}{{ 1 in d }}"),
            ("{% for a in recursive %}", "{% for a in ( recursive)|E %}"),
            ("{% forms %}{% for a in %}", "{% forms %}{% for a in %}"),
            ("{%- set n.x=[n.x] -%}", "{%- set n.x= ([n.x])|S -%}"),
            ("{% set x = a if b == c %}", "{% set x = ( a if b == c)|K %}"),
            ("{% set(n.x, y) = f(z=1), [2, 3] %}", "{% set(n.x, y) = ( f(z=1))|S, ( [2, 3])|S %}"),
            ("{% set x = 1, %}{% set y %}", "{% set x = ( 1)|K, %}{% set y %}"),
            ("{% set n.x|zip([n.x]) %}", "{% set n.x|zip([n.x])|S %}"),
            ("{% with a = [b, c], d=e.f %}", "{% with a = ( [b, c])|K, d= (e.f)|K %}"),
            ("{{ set.x }}{{ f(set=1) }}{% settle x = 1 %}", "{{ set.x }}{{ f(set=1) }}{% settle x = 1 %}"),
            (r##"{#}{{ "#}{{ a ~ b }}"}}#}"##, r##"{#}{{ "#}{{ (a|T ~ b|T)|F }}"}}#}"##),
            (
                "{% raw %}{%--endraw%}{{ '{% endraw %}{{ a ~ b }}' }}",
                "{% raw %}{%--endraw%}{{ '{% endraw %}{{ (a|T ~ b|T)|F }}' }}",
            ),
            (
                "a{%- generation -%}b{% endgeneration %}{{ '{#' }}{% generation %}{# {% generation %} #}",
                "a{%- with -%}b{% endwith %}{{ '{#' }}{% with %}{# {% generation %} #}",
            ),
            ("{% raw %}{% generation %}{% endraw %}", "{% raw %}{% generation %}{% endraw %}"),
            ("{{ endgeneration }} {% x", "{{ endgeneration }} {% x"),
        ];
        for (source, expected) in cases {
            let filters = [(FIT, "F"), (EACH, "E"), (TEXT, "T"), (KEPT, "K"), (STORED, "S")];
            let short =
                |text: String| filters.iter().fold(text, |text, (long, short)| text.replace(long, short));
            let found = guarded(source).map(short);
            assert_eq!(found, Ok(expected.to_owned()));
        }
    }
}
