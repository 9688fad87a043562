//! Random grammars, and an oracle that decides by exhaustive search whether a text matches one.

use proptest::prelude::*;

/// A rule of a random grammar.
#[derive(Debug, Clone)]
pub enum Rule {
    /// One of these characters.
    Set(&'static [char]),
    /// One rule after the other.
    Sequence(Vec<Rule>),
    /// One of several rules.
    Choice(Vec<Rule>),
    /// A rule at least, and if given at most, this many times.
    Repeat(Box<Rule>, usize, Option<usize>),
    /// The rule, or the root rule in parentheses.
    Nested(Box<Rule>),
}

impl Rule {
    /// Returns the rule in GBNF.
    pub fn write(&self) -> String {
        let all = |rules: &[Rule], by: &str| rules.iter().map(Rule::write).collect::<Vec<_>>().join(by);
        match self {
            Rule::Set(set) => format!("[{}]", set.iter().collect::<String>()),
            Rule::Sequence(rules) => format!("({})", all(rules, " ")),
            Rule::Choice(rules) => format!("({})", all(rules, " | ")),
            Rule::Repeat(rule, least, None) => format!("{}{{{least},}}", rule.write()),
            Rule::Repeat(rule, least, Some(most)) => format!("{}{{{least},{most}}}", rule.write()),
            Rule::Nested(rule) => format!("(\"(\" root \")\" | {})", rule.write()),
        }
    }

    /// Returns every position at which a match that begins at `from` may end, by trying all of them.
    pub fn ends(&self, root: &Rule, text: &[char], from: usize) -> Vec<usize> {
        let mut ends = match self {
            Rule::Set(set) => {
                text.get(from).filter(|next| set.contains(next)).map(|_| from + 1).into_iter().collect()
            }
            Rule::Sequence(rules) => rules.iter().fold(vec![from], |places, rule| {
                places.iter().flat_map(|&place| rule.ends(root, text, place)).collect()
            }),
            Rule::Choice(rules) => rules.iter().flat_map(|rule| rule.ends(root, text, from)).collect(),
            Rule::Repeat(rule, least, most) => {
                let (mut places, mut ends) = (vec![from], Vec::new());
                for times in 0..=most.unwrap_or(text.len() + least) {
                    if times >= *least {
                        ends.extend(&places);
                    }
                    places = places.iter().flat_map(|&place| rule.ends(root, text, place)).collect();
                    places.sort_unstable();
                    places.dedup();
                }
                ends
            }
            Rule::Nested(rule) => {
                let mut ends = rule.ends(root, text, from);
                if text.get(from) == Some(&'(') {
                    let inner = root.ends(root, text, from + 1).into_iter();
                    ends.extend(inner.filter(|&end| text.get(end) == Some(&')')).map(|end| end + 1));
                }
                ends
            }
        };
        ends.sort_unstable();
        ends.dedup();
        ends
    }
}

/// Generates rules; `nested` ones refer to the root.
pub fn rules(nested: bool) -> impl Strategy<Value = Rule> {
    let set = prop::sample::select(vec![&['a'][..], &['b'], &['a', 'b'], &['c', 'd']]).prop_map(Rule::Set);
    set.prop_recursive(3, 12, 3, move |rule| {
        let several = || prop::collection::vec(rule.clone(), 1..4);
        let repeat =
            (rule.clone(), 0usize..3, prop::option::of(0usize..3)).prop_map(|(rule, least, more)| {
                Rule::Repeat(Box::new(rule), least, more.map(|more| least + more))
            });
        let within = rule.clone().prop_map(move |rule| match nested {
            true => Rule::Nested(Box::new(rule)),
            false => rule,
        });
        prop_oneof![several().prop_map(Rule::Sequence), several().prop_map(Rule::Choice), repeat, within]
    })
}
