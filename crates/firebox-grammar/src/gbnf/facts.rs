//! Facts about the rules of a grammar that decide its translation.

use std::collections::VecDeque;

use super::characters::Characters;
use super::effort::Effort;
use super::parser::{Node, Rules};

/// The facts about a node that is a regular expression.
#[derive(Debug, Clone, Default)]
pub(super) struct Shape {
    pub may_be_empty: bool,
    first: Characters,
    /// Characters that may follow a complete text and make it a longer one.
    next: Characters,
    all: Characters,
    /// Whether the next character always decides how the text continues. Where it does not, `next` may be incomplete.
    plain: bool,
}

impl Shape {
    /// Returns the characters that may follow a complete text and continue it, or the start of a longer one.
    pub fn longer(&self) -> &Characters {
        if self.plain { &self.next } else { &self.all }
    }

    fn empty() -> Self {
        Self { may_be_empty: true, plain: true, ..Self::default() }
    }

    fn then(mut self, other: Self, effort: &Effort) -> Self {
        self.plain &= other.plain && !effort.meet(&self.next, &other.first);
        effort.add(&mut self.all, &other.all);
        if self.may_be_empty {
            effort.add(&mut self.first, &other.first);
        }
        if other.may_be_empty {
            effort.add(&mut self.next, &other.next);
        } else {
            self.next = other.next;
        }
        self.may_be_empty &= other.may_be_empty;
        self
    }

    fn or(mut self, other: &Self, effort: &Effort) -> Self {
        self.plain &= other.plain && !effort.meet(&self.first, &other.first);
        effort.add(&mut self.all, &other.all);
        effort.add(&mut self.first, &other.first);
        effort.add(&mut self.next, &other.next);
        self.may_be_empty |= other.may_be_empty;
        if self.may_be_empty {
            effort.add(&mut self.next, &self.first);
        }
        self
    }

    fn repeated(mut self, least: u32, most: Option<u32>, effort: &Effort) -> Self {
        if most == Some(0) {
            return Self::empty();
        }
        if most != Some(1) {
            self.plain &= !effort.meet(&self.next, &self.first);
            effort.add(&mut self.next, &self.first);
        }
        if least == 0 {
            self.may_be_empty = true;
            effort.add(&mut self.next, &self.first);
        }
        self
    }

    fn sets(&self) -> [&Characters; 3] {
        [&self.first, &self.next, &self.all]
    }
}

/// A queue of rules, each of which is queued at most once.
struct Queue {
    rules: VecDeque<usize>,
    waits: Vec<bool>,
}

impl Queue {
    /// Queues all rules, the last one first: rules tend to come before those they use.
    fn all(count: usize) -> Self {
        Self { rules: (0..count).rev().collect(), waits: vec![true; count] }
    }

    fn push(&mut self, rule: usize) {
        if !std::mem::replace(&mut self.waits[rule], true) {
            self.rules.push_back(rule);
        }
    }

    fn pop(&mut self) -> Option<usize> {
        let rule = self.rules.pop_front()?;
        self.waits[rule] = false;
        Some(rule)
    }
}

/// The facts about the rules of a grammar.
#[derive(Debug)]
pub(super) struct Facts {
    /// The rules that are regular expressions: those that reach no recursive rule.
    shapes: Vec<Option<Shape>>,
    /// The regular rules, each after those that it uses.
    regular: Vec<usize>,
    first: Vec<Characters>,
    may_be_empty: Vec<bool>,
    follow: Vec<Characters>,
    effort: Effort,
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
            effort: Effort::default(),
        };
        let used: Vec<Vec<usize>> = rules.bodies.iter().map(rules_in).collect();
        let mut users = vec![Vec::new(); count];
        for (rule, used) in used.iter().enumerate() {
            used.iter().for_each(|used| users[*used].push(rule));
        }
        facts.find_shapes(rules, &used, &users);
        facts.find_first(rules, &users);
        facts.find_follow(rules);
        facts
    }

    /// Returns the cost so far. The facts are correct as long as its limit is not exceeded.
    pub fn effort(&self) -> &Effort {
        &self.effort
    }

    pub fn regular_rules(&self) -> &[usize] {
        &self.regular
    }

    /// Returns the characters that may follow a rule.
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

    /// Returns the facts about a node, if it is a regular expression.
    pub fn shape(&self, node: &Node) -> Option<Shape> {
        if self.effort.is_spent() {
            return None;
        }
        Some(match node {
            Node::Characters(set) => {
                self.effort.spend(1 + 2 * set.ranges());
                Shape {
                    may_be_empty: false,
                    first: set.clone(),
                    next: Characters::default(),
                    all: set.clone(),
                    plain: true,
                }
            }
            Node::Token(_) => return None,
            Node::Rule(rule) => {
                let shape = self.shapes[*rule].as_ref()?;
                self.effort.spend(1 + shape.sets().iter().map(|set| set.ranges()).sum::<usize>());
                shape.clone()
            }
            Node::Sequence(parts) => self.shape_of_row(parts)?,
            Node::Choice(choices) => {
                let mut choices = choices.iter().map(|choice| self.shape(choice));
                let first = choices.next()??;
                choices.try_fold(first, |shape, choice| Some(shape.or(&choice?, &self.effort)))?
            }
            Node::Repeat(part, least, most) => self.shape(part)?.repeated(*least, *most, &self.effort),
        })
    }

    /// Returns the facts about a sequence of nodes.
    pub fn shape_of_row(&self, parts: &[Node]) -> Option<Shape> {
        parts.iter().try_fold(Shape::empty(), |shape, part| Some(shape.then(self.shape(part)?, &self.effort)))
    }

    /// Returns the characters that a node may begin with.
    pub fn first(&self, node: &Node) -> Characters {
        let mut first = Characters::default();
        self.add_first(node, &mut first);
        first
    }

    fn add_first(&self, node: &Node, first: &mut Characters) {
        if self.effort.is_spent() {
            return;
        }
        self.effort.spend(1);
        match node {
            Node::Characters(set) => self.effort.add(first, set),
            Node::Token(_) | Node::Repeat(_, _, Some(0)) => {}
            Node::Rule(rule) => self.effort.add(first, &self.first[*rule]),
            Node::Sequence(parts) => {
                self.add_first_of_row(parts, first);
            }
            Node::Choice(choices) => choices.iter().for_each(|choice| self.add_first(choice, first)),
            Node::Repeat(part, ..) => self.add_first(part, first),
        }
    }

    /// Adds the characters that a sequence of nodes may begin with. Returns whether all of them may be empty.
    pub fn add_first_of_row(&self, parts: &[Node], first: &mut Characters) -> bool {
        parts.iter().all(|part| {
            self.add_first(part, first);
            self.may_be_empty(part)
        })
    }

    pub fn may_be_empty(&self, node: &Node) -> bool {
        self.effort.spend(1);
        match node {
            Node::Characters(_) | Node::Token(_) => false,
            Node::Rule(rule) => self.may_be_empty[*rule],
            Node::Sequence(parts) => parts.iter().all(|part| self.may_be_empty(part)),
            Node::Choice(choices) => choices.iter().any(|choice| self.may_be_empty(choice)),
            Node::Repeat(part, least, _) => *least == 0 || self.may_be_empty(part),
        }
    }

    fn find_shapes(&mut self, rules: &Rules, used: &[Vec<usize>], users: &[Vec<usize>]) {
        let mut open: Vec<usize> = used.iter().map(Vec::len).collect();
        let mut ready: Vec<usize> = (0..open.len()).filter(|&rule| open[rule] == 0).collect();
        while let Some(rule) = ready.pop() {
            if let Some(shape) = self.shape(&rules.bodies[rule]) {
                shape.sets().iter().for_each(|set| self.effort.keep(set));
                self.shapes[rule] = Some(shape);
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

    fn find_first(&mut self, rules: &Rules, users: &[Vec<usize>]) {
        let mut changed = Queue::all(users.len());
        while let Some(rule) = changed.pop() {
            let body = &rules.bodies[rule];
            let (first, may_be_empty) = (self.first(body), self.may_be_empty(body));
            if first != self.first[rule] || may_be_empty != self.may_be_empty[rule] {
                self.effort.keep(&first);
                (self.first[rule], self.may_be_empty[rule]) = (first, may_be_empty);
                users[rule].iter().for_each(|&user| changed.push(user));
            }
            if self.effort.is_spent() {
                return;
            }
        }
    }

    fn find_follow(&mut self, rules: &Rules) {
        let mut changed = Queue::all(rules.bodies.len());
        while let Some(rule) = changed.pop() {
            let follow = self.follow[rule].clone();
            self.follow_within(&rules.bodies[rule], &follow, &mut changed);
        }
    }

    /// Adds the characters that may follow the rules within a node that `follow` may follow.
    fn follow_within(&mut self, node: &Node, follow: &Characters, changed: &mut Queue) {
        if self.effort.is_spent() {
            return;
        }
        self.effort.spend(1 + follow.ranges());
        match node {
            Node::Characters(_) | Node::Token(_) | Node::Repeat(_, _, Some(0)) => {}
            Node::Rule(rule) => {
                let known = &mut self.follow[*rule];
                if !known.contains(follow) {
                    self.effort.add(known, follow);
                    self.effort.keep(known);
                    changed.push(*rule);
                }
            }
            Node::Sequence(parts) => {
                let mut behind = follow.clone();
                for part in parts.iter().rev() {
                    self.follow_within(part, &behind, changed);
                    let first = self.first(part);
                    if self.may_be_empty(part) {
                        self.effort.add(&mut behind, &first);
                    } else {
                        behind = first;
                    }
                }
            }
            Node::Choice(choices) => {
                choices.iter().for_each(|choice| self.follow_within(choice, follow, changed));
            }
            Node::Repeat(part, _, most) => {
                let mut behind = follow.clone();
                if *most != Some(1) {
                    self.effort.add(&mut behind, &self.first(part));
                }
                self.follow_within(part, &behind, changed);
            }
        }
    }
}

/// Returns the rules that a node uses, each as often as it occurs.
fn rules_in(node: &Node) -> Vec<usize> {
    let (mut found, mut open) = (Vec::new(), vec![node]);
    while let Some(node) = open.pop() {
        match node {
            Node::Characters(_) | Node::Token(_) => {}
            Node::Rule(rule) => found.push(*rule),
            Node::Sequence(parts) | Node::Choice(parts) => open.extend(parts),
            Node::Repeat(part, ..) => open.push(part),
        }
    }
    found
}
