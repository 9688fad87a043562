//! The parser of GBNF.

use std::collections::HashMap;
use std::iter::Peekable;
use std::str::Chars;

use super::characters::Characters;

/// Limits of a grammar. What exceeds them is an attack.
const MAX_BYTES: usize = 128 << 10;
const MAX_RULES: usize = 1000;
const MAX_REPEATS: u32 = 10_000;
/// Repetitions of repetitions, as in `x?*+`. Parsers of grammars are recursive.
const MAX_NESTED_REPEATS: usize = 4;

/// A node of a rule.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Node {
    Characters(Characters),
    Sequence(Vec<Node>),
    Choice(Vec<Node>),
    /// A repetition, at least and at most a number of times.
    Repeat(Box<Node>, u32, Option<u32>),
    Rule(usize),
    /// A token by its name.
    Token(String),
}

/// The rules by number. A text begins with the first.
#[derive(Debug)]
pub(super) struct Rules {
    pub bodies: Vec<Node>,
}

impl Rules {
    /// Parses a grammar. Errors name line and column.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.len() > MAX_BYTES {
            return Err(format!("its {} bytes are more than {MAX_BYTES}", text.len()));
        }
        let mut parser =
            Parser { text: text.chars().peekable(), line: 1, column: 1, names: Names::default() };
        parser.names.number("root");
        parser.rules()
    }
}

#[derive(Default)]
struct Names {
    numbers: HashMap<String, usize>,
    /// The place of the first mention of each rule, and its node once it is defined.
    rules: Vec<(String, String, Option<Node>)>,
}

impl Names {
    fn number(&mut self, name: &str) -> usize {
        self.number_at(name, "it")
    }

    fn number_at(&mut self, name: &str, place: &str) -> usize {
        if let Some(&number) = self.numbers.get(name) {
            return number;
        }
        let number = self.rules.len();
        self.numbers.insert(name.to_owned(), number);
        self.rules.push((name.to_owned(), place.to_owned(), None));
        number
    }
}

struct Parser<'t> {
    text: Peekable<Chars<'t>>,
    line: usize,
    column: usize,
    names: Names,
}

impl Parser<'_> {
    fn rules(mut self) -> Result<Rules, String> {
        self.skip(true);
        while self.text.peek().is_some() {
            let place = self.place();
            let name = self.name()?;
            self.skip(false);
            for expected in "::=".chars() {
                self.expect(expected)?;
            }
            self.skip(true);
            let body = self.choice(false)?;
            let number = self.names.number_at(&name, &place);
            if self.names.rules.len() > MAX_RULES {
                return Err(format!("it has more than {MAX_RULES} rules"));
            }
            if self.names.rules[number].2.replace(body).is_some() {
                return Err(format!("{place}: rule `{name}` is there twice"));
            }
            if !matches!(self.text.peek(), None | Some('\n' | '\r')) {
                return Err(self.wrong("a rule ends at the end of its line"));
            }
            self.skip(true);
        }
        let bodies = self.names.rules.into_iter().map(|(name, place, body)| match body {
            Some(body) => Ok(body),
            None => Err(format!("{place}: there is no rule `{name}`")),
        });
        Ok(Rules { bodies: bodies.collect::<Result<_, _>>()? })
    }

    fn choice(&mut self, nested: bool) -> Result<Node, String> {
        let mut choices = vec![self.sequence(nested)?];
        while self.text.peek() == Some(&'|') {
            self.next();
            self.skip(true);
            choices.push(self.sequence(nested)?);
        }
        Ok(if choices.len() == 1 { choices.remove(0) } else { Node::Choice(choices) })
    }

    fn sequence(&mut self, nested: bool) -> Result<Node, String> {
        let mut parts = Vec::new();
        loop {
            let part = match self.text.peek() {
                Some('"') => self.literal()?,
                Some('[') => Node::Characters(self.class()?),
                Some('.') => {
                    self.next();
                    Node::Characters(Characters::all())
                }
                Some('(') => {
                    self.next();
                    self.skip(true);
                    let inner = self.choice(true)?;
                    self.expect(')')?;
                    inner
                }
                Some('<') => self.token()?,
                Some(letter) if is_word(*letter) => {
                    let place = self.place();
                    let name = self.name()?;
                    Node::Rule(self.names.number_at(&name, &place))
                }
                Some('!') => return Err(self.wrong("tokens cannot be ruled out here")),
                _ => break,
            };
            self.skip(nested);
            parts.push(self.repeated(part, nested)?);
        }
        Ok(if parts.len() == 1 { parts.remove(0) } else { Node::Sequence(parts) })
    }

    fn repeated(&mut self, mut part: Node, nested: bool) -> Result<Node, String> {
        for _ in 0..=MAX_NESTED_REPEATS {
            let (least, most) = match self.text.peek() {
                Some('{') => self.times()?,
                Some('*') => self.followed_by((0, None)),
                Some('+') => self.followed_by((1, None)),
                Some('?') => self.followed_by((0, Some(1))),
                _ => return Ok(part),
            };
            self.skip(nested);
            part = Node::Repeat(Box::new(part), least, most);
        }
        Err(self.wrong(&format!("more than {MAX_NESTED_REPEATS} repetitions of repetitions")))
    }

    /// Combines a repetition with the operator behind it.
    fn followed_by(&mut self, times: (u32, Option<u32>)) -> (u32, Option<u32>) {
        self.next();
        times
    }

    fn times(&mut self) -> Result<(u32, Option<u32>), String> {
        self.expect('{')?;
        self.skip(false);
        let least = self.count()?;
        self.skip(false);
        let mut most = least;
        if self.text.peek() == Some(&',') {
            self.next();
            self.skip(false);
            most = self.count()?;
            self.skip(false);
        } else if least.is_none() {
            return Err(self.wrong("a number is missing"));
        }
        self.expect('}')?;
        let least = least.unwrap_or(0);
        if most.is_some_and(|most| most < least) {
            return Err(self.wrong("at most is less than at least"));
        }
        Ok((least, most))
    }

    fn count(&mut self) -> Result<Option<u32>, String> {
        let mut count = None;
        while let Some(digit) = self.text.peek().and_then(|digit| digit.to_digit(10)) {
            let now = count.unwrap_or(0) * 10 + digit;
            if now > MAX_REPEATS {
                return Err(self.wrong(&format!("more than {MAX_REPEATS} repetitions")));
            }
            count = Some(now);
            self.next();
        }
        Ok(count)
    }

    fn literal(&mut self) -> Result<Node, String> {
        self.expect('"')?;
        let mut parts = Vec::new();
        while self.text.peek() != Some(&'"') {
            parts.push(Node::Characters(Characters::one(self.character()?)));
        }
        self.next();
        Ok(if parts.len() == 1 { parts.remove(0) } else { Node::Sequence(parts) })
    }

    fn class(&mut self) -> Result<Characters, String> {
        self.expect('[')?;
        let others = self.text.peek() == Some(&'^');
        if others {
            self.next();
        }
        let mut sets = Vec::new();
        while self.text.peek() != Some(&']') {
            let first = self.character()?;
            let mut last = first;
            let mut ahead = self.text.clone();
            if ahead.next() == Some('-') && ahead.peek() != Some(&']') {
                self.next();
                last = self.character()?;
            }
            sets.push(Characters::range(first, last));
        }
        self.next();
        let set = Characters::joined(sets);
        let set = if others { set.others() } else { set };
        if set.is_empty() { Err(self.wrong("no character is in these brackets")) } else { Ok(set) }
    }

    fn character(&mut self) -> Result<char, String> {
        match self.next() {
            None | Some('\n') => Err(self.wrong("the end of a text or of a set is missing")),
            Some('\\') => match self.next() {
                Some('n') => Ok('\n'),
                Some('r') => Ok('\r'),
                Some('t') => Ok('\t'),
                Some(same @ ('\\' | '"' | '[' | ']' | '-' | '^')) => Ok(same),
                Some('x') => self.coded(2),
                Some('u') => self.coded(4),
                Some('U') => self.coded(8),
                _ => Err(self.wrong("no such escape")),
            },
            Some(plain) => Ok(plain),
        }
    }

    fn coded(&mut self, digits: usize) -> Result<char, String> {
        let mut code = 0u32;
        for _ in 0..digits {
            let digit = self.next().and_then(|digit| digit.to_digit(16));
            code = code << 4
                | digit.ok_or_else(|| self.wrong(&format!("{digits} hexadecimal digits are needed")))?;
        }
        char::from_u32(code).ok_or_else(|| self.wrong("there is no character of that code"))
    }

    fn token(&mut self) -> Result<Node, String> {
        let mut name = String::new();
        loop {
            match self.next() {
                Some('>') => break,
                Some(part) if !part.is_whitespace() && (part != '<' || name.is_empty()) => name.push(part),
                _ => return Err(self.wrong("the name of a token ends in `>`")),
            }
        }
        name.push('>');
        Ok(Node::Token(name))
    }

    fn name(&mut self) -> Result<String, String> {
        let mut name = String::new();
        while let Some(letter) = self.text.next_if(|letter| is_word(*letter)) {
            self.column += 1;
            name.push(letter);
        }
        if name.is_empty() { Err(self.wrong("the name of a rule is expected")) } else { Ok(name) }
    }

    fn skip(&mut self, lines: bool) {
        while let Some(&next) = self.text.peek() {
            match next {
                ' ' | '\t' => {}
                '\n' | '\r' if lines => {}
                '#' => {
                    while self.text.peek().is_some_and(|next| *next != '\n') {
                        self.next();
                    }
                    continue;
                }
                _ => return,
            }
            self.next();
        }
    }

    fn next(&mut self) -> Option<char> {
        let next = self.text.next()?;
        if next == '\n' {
            (self.line, self.column) = (self.line + 1, 1);
        } else {
            self.column += 1;
        }
        Some(next)
    }

    fn expect(&mut self, expected: char) -> Result<(), String> {
        if self.text.peek() == Some(&expected) {
            self.next();
            return Ok(());
        }
        Err(self.wrong(&format!("`{expected}` is expected")))
    }

    fn place(&self) -> String {
        format!("line {}, column {}", self.line, self.column)
    }

    fn wrong(&self, what: &str) -> String {
        format!("{}: {what}", self.place())
    }
}

fn is_word(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrong(text: &str, place: &str, words: &str) {
        let reason = Rules::parse(text).unwrap_err();
        assert!(reason.starts_with(place) && reason.contains(words), "{reason}");
    }

    #[test]
    fn errors_name_their_place() {
        wrong("root ::= \"a", "line 1, column 12", "end of a text");
        wrong("root ::= a\n", "line 1, column 10", "no rule `a`");
        wrong("a ::= \"b\"", "it: ", "no rule `root`");
        wrong("root ::= (\"a\"\n", "line 2, column 1", "`)`");
        wrong("root ::= \"a\"\nroot ::= \"b\"", "line 2, column 1", "twice");
        wrong("root ::= [a-", "line 1", "end");
        wrong("root ::= []", "line 1, column 12", "no character");
        wrong("root ::= \"\\q\"", "line 1, column 13", "escape");
        wrong("root ::= \"a\"{3,2}", "line 1, column 18", "at most");
        wrong("root ::= \"a\"{99999}", "line 1", "repetitions");
        wrong("root ::= \"a\"+++++", "line 1, column 18", "repetitions of repetitions");
        wrong("root = \"a\"", "line 1, column 6", "`:`");
        wrong("root ::= \"\\uD800\"", "line 1, column 17", "no character");
    }

    #[test]
    fn a_rule_continues_after_a_bar_and_within_brackets() {
        let rules = Rules::parse("root ::= # first\n  \"a\" |\n  (\n \"b\"\n \"c\" ) # last\n\n\nx ::= root")
            .unwrap();
        assert_eq!(rules.bodies.len(), 2);
        assert!(matches!(&rules.bodies[0], Node::Choice(parts) if parts.len() == 2));
        assert_eq!(rules.bodies[1], Node::Rule(0));
    }
}
