use super::characters::Characters;
use super::parser::{Node, Rules};

/// What is to be known of a node that is a regular expression.
#[derive(Debug, Clone, Default)]
pub(super) struct Shape {
    pub may_be_empty: bool,
    first: Characters,
    /// What may come behind a complete text and make it a longer one.
    next: Characters,
    all: Characters,
    /// Whether the next character always says how to go on. Where it does not, `next` may lack some.
    plain: bool,
}

impl Shape {
    /// What may come behind a complete text and make it, or the beginning of a longer one, go on.
    pub fn longer(&self) -> &Characters {
        if self.plain { &self.next } else { &self.all }
    }

    fn empty() -> Self {
        Self { may_be_empty: true, plain: true, ..Self::default() }
    }

    fn then(mut self, other: &Self) -> Self {
        self.plain &= other.plain && !self.next.meets(&other.first);
        self.all.add(&other.all);
        if self.may_be_empty {
            self.first.add(&other.first);
        }
        self.next = if other.may_be_empty { self.next.and(&other.next) } else { other.next.clone() };
        self.may_be_empty &= other.may_be_empty;
        self
    }

    fn or(mut self, other: &Self) -> Self {
        self.plain &= other.plain && !self.first.meets(&other.first);
        self.all.add(&other.all);
        self.first.add(&other.first);
        self.next.add(&other.next);
        self.may_be_empty |= other.may_be_empty;
        if self.may_be_empty {
            self.next.add(&self.first);
        }
        self
    }

    fn repeated(mut self, least: u32, most: Option<u32>) -> Self {
        if most == Some(0) {
            return Self::empty();
        }
        if most != Some(1) {
            self.plain &= !self.next.meets(&self.first);
            self.next.add(&self.first);
        }
        if least == 0 {
            self.may_be_empty = true;
            self.next.add(&self.first);
        }
        self
    }
}

/// What is to be known of a grammar's rules.
#[derive(Debug)]
pub(super) struct Facts {
    /// Of rules that are regular expressions: those that do not lead back to themselves, nor to any that do.
    shapes: Vec<Option<Shape>>,
    /// These, each behind those that it consists of.
    regular: Vec<usize>,
    first: Vec<Characters>,
    may_be_empty: Vec<bool>,
    follow: Vec<Characters>,
}

impl Facts {
    pub fn of(rules: &Rules) -> Self {
        let count = rules.bodies.len();
        let mut facts = Self {
            shapes: vec![None; count],
            regular: Vec::new(),
            first: vec![Characters::default(); count],
            may_be_empty: vec![false; count],
            follow: vec![Characters::default(); count],
        };
        facts.find_shapes(rules);
        facts.find_first(rules);
        facts.find_follow(rules);
        facts
    }

    pub fn regular_rules(&self) -> &[usize] {
        &self.regular
    }

    /// What may come behind a rule.
    pub fn follow(&self, rule: usize) -> &Characters {
        &self.follow[rule]
    }

    pub fn is_regular(&self, node: &Node) -> bool {
        match node {
            Node::Characters(_) => true,
            Node::Token(_) => false,
            Node::Rule(rule) => self.shapes[*rule].is_some(),
            Node::Sequence(parts) | Node::Choice(parts) => parts.iter().all(|part| self.is_regular(part)),
            Node::Repeat(part, ..) => self.is_regular(part),
        }
    }

    /// That of a node, if it is a regular expression.
    pub fn shape(&self, node: &Node) -> Option<Shape> {
        Some(match node {
            Node::Characters(set) => Shape {
                may_be_empty: false,
                first: set.clone(),
                next: Characters::default(),
                all: set.clone(),
                plain: true,
            },
            Node::Token(_) => return None,
            Node::Rule(rule) => self.shapes[*rule].clone()?,
            Node::Sequence(parts) => {
                let mut shape = Shape::empty();
                for part in parts {
                    shape = shape.then(&self.shape(part)?);
                }
                shape
            }
            Node::Choice(choices) => {
                let mut choices = choices.iter().map(|choice| self.shape(choice));
                let first = choices.next()??;
                choices.try_fold(first, |shape, choice| Some(shape.or(&choice?)))?
            }
            Node::Repeat(part, least, most) => self.shape(part)?.repeated(*least, *most),
        })
    }

    /// What a node may begin with.
    pub fn first(&self, node: &Node) -> Characters {
        match node {
            Node::Characters(set) => set.clone(),
            Node::Token(_) | Node::Repeat(_, _, Some(0)) => Characters::default(),
            Node::Rule(rule) => self.first[*rule].clone(),
            Node::Sequence(parts) => {
                let mut first = Characters::default();
                for part in parts {
                    first.add(&self.first(part));
                    if !self.may_be_empty(part) {
                        break;
                    }
                }
                first
            }
            Node::Choice(choices) => {
                choices.iter().fold(Characters::default(), |first, choice| first.and(&self.first(choice)))
            }
            Node::Repeat(part, ..) => self.first(part),
        }
    }

    pub fn may_be_empty(&self, node: &Node) -> bool {
        match node {
            Node::Characters(_) | Node::Token(_) => false,
            Node::Rule(rule) => self.may_be_empty[*rule],
            Node::Sequence(parts) => parts.iter().all(|part| self.may_be_empty(part)),
            Node::Choice(choices) => choices.iter().any(|choice| self.may_be_empty(choice)),
            Node::Repeat(part, least, _) => *least == 0 || self.may_be_empty(part),
        }
    }

    fn find_shapes(&mut self, rules: &Rules) {
        let count = rules.bodies.len();
        let mut users = vec![Vec::new(); count];
        let mut open = vec![0; count];
        for (rule, body) in rules.bodies.iter().enumerate() {
            let mut used = Vec::new();
            rules_in(body, &mut used);
            open[rule] = used.len();
            used.into_iter().for_each(|used| users[used].push(rule));
        }
        let mut ready: Vec<usize> = (0..count).filter(|&rule| open[rule] == 0).collect();
        while let Some(rule) = ready.pop() {
            self.shapes[rule] = self.shape(&rules.bodies[rule]);
            if self.shapes[rule].is_some() {
                self.regular.push(rule);
            }
            for &user in &users[rule] {
                open[user] -= 1;
                if open[user] == 0 {
                    ready.push(user);
                }
            }
        }
    }

    fn find_first(&mut self, rules: &Rules) {
        let mut changed = true;
        while std::mem::take(&mut changed) {
            for (rule, body) in rules.bodies.iter().enumerate() {
                let (first, may_be_empty) = (self.first(body), self.may_be_empty(body));
                if first != self.first[rule] || may_be_empty != self.may_be_empty[rule] {
                    (self.first[rule], self.may_be_empty[rule]) = (first, may_be_empty);
                    changed = true;
                }
            }
        }
    }

    fn find_follow(&mut self, rules: &Rules) {
        let mut changed = true;
        while std::mem::take(&mut changed) {
            for (rule, body) in rules.bodies.iter().enumerate() {
                let follow = self.follow[rule].clone();
                changed |= self.follow_within(body, follow);
            }
        }
    }

    /// What may come behind the rules within a node behind which so much may come. True if anything is new.
    fn follow_within(&mut self, node: &Node, mut follow: Characters) -> bool {
        match node {
            Node::Characters(_) | Node::Token(_) | Node::Repeat(_, _, Some(0)) => false,
            Node::Rule(rule) => {
                follow.add(&self.follow[*rule]);
                let new = follow != self.follow[*rule];
                self.follow[*rule] = follow;
                new
            }
            Node::Sequence(parts) => {
                let mut new = false;
                for part in parts.iter().rev() {
                    new |= self.follow_within(part, follow.clone());
                    let first = self.first(part);
                    follow = if self.may_be_empty(part) { follow.and(&first) } else { first };
                }
                new
            }
            Node::Choice(choices) => {
                choices.iter().fold(false, |new, choice| self.follow_within(choice, follow.clone()) | new)
            }
            Node::Repeat(part, _, most) => {
                if *most != Some(1) {
                    follow.add(&self.first(part));
                }
                self.follow_within(part, follow)
            }
        }
    }
}

fn rules_in(node: &Node, found: &mut Vec<usize>) {
    match node {
        Node::Characters(_) | Node::Token(_) => {}
        Node::Rule(rule) => found.push(*rule),
        Node::Sequence(parts) | Node::Choice(parts) => parts.iter().for_each(|part| rules_in(part, found)),
        Node::Repeat(part, ..) => rules_in(part, found),
    }
}
