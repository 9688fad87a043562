//! Small programs and the words in which they are asked for.

use super::Split;
use super::draw::Draw;
use super::words;

/// A request for a program and the program.
#[derive(Debug, Clone)]
pub(super) struct Program {
    pub request: String,
    pub code: String,
}

impl Program {
    /// A program of `split`.
    pub(super) fn draw(split: Split, draw: &mut Draw) -> Self {
        loop {
            let program = match draw.below(8) {
                0..4 => function(draw),
                4 => counting(draw),
                5 => condition(draw),
                6 => list(draw),
                _ => repetition(draw),
            };
            if Split::of(&program.code) == split {
                return program;
            }
        }
    }
}

fn name(draw: &mut Draw) -> String {
    if draw.percent(50) { draw.word(words::VARIABLES).to_owned() } else { words::made_up(draw) }
}

fn function(draw: &mut Draw) -> Program {
    let steps = draw.weighted(&[(3, 1), (4, 2), (2, 3)]);
    let mut expression = "x".to_owned();
    let mut phrases = Vec::new();
    for step in 0..steps {
        let number = draw.between(2, 60);
        let (phrase, operator, number) = match draw.below(7) {
            0 => (format!("adds {number}"), '+', number),
            1 => (format!("subtracts {number}"), '-', number),
            2 => (format!("multiplies by {number}"), '*', number),
            3 => (format!("divides by {number}"), '/', number),
            4 => ("doubles".to_owned(), '*', 2),
            5 => ("triples".to_owned(), '*', 3),
            _ => ("halves".to_owned(), '/', 2),
        };
        phrases.push(phrase);
        expression = if step == 0 {
            format!("{expression} {operator} {number}")
        } else {
            format!("({expression}) {operator} {number}")
        };
    }
    let what = if draw.percent(30) { phrases.join(", then ") } else { phrases.join(" and ") };
    let verb = draw.word(&["Write", "Make", "Give me", "I need", "Please write", "Can you write"]);
    let (called, name) = if draw.percent(70) {
        let name = name(draw);
        let word = draw.word(&["called", "named"]);
        (format!(" {word} {name}"), name)
    } else {
        (String::new(), "f".to_owned())
    };
    Program {
        request: format!("{verb} a function{called} that {what}."),
        code: format!("fn {name}(x) {{ return {expression}; }}"),
    }
}

fn counting(draw: &mut Draw) -> Program {
    let from = draw.between(0, 9);
    let to = draw.between(from + 1, 99);
    let request = match draw.below(3) {
        0 => format!("Write a loop from {from} to {to}."),
        1 => format!("Print the numbers from {from} to {to}."),
        _ => format!("Count from {from} to {to}."),
    };
    Program { request, code: format!("for i = {from} to {to} {{ print i; }}") }
}

fn condition(draw: &mut Draw) -> Program {
    let (words, sign) = *draw.one(&[
        ("is greater than", '>'),
        ("is more than", '>'),
        ("is less than", '<'),
        ("is smaller than", '<'),
        ("is", '='),
    ]);
    let (variable, output, number) = (draw.word(words::VARIABLES), words::made_up(draw), draw.between(1, 99));
    let request = if draw.percent(50) {
        format!("If {variable} {words} {number}, print {output}.")
    } else {
        format!("Print {output} if {variable} {words} {number}.")
    };
    Program { request, code: format!("if {variable} {sign} {number} {{ print {output}; }}") }
}

fn list(draw: &mut Draw) -> Program {
    let numbers = draw.percent(50);
    let items: Vec<_> = (0..draw.between(2, 4))
        .map(|_| if numbers { draw.between(1, 99).to_string() } else { words::companion(draw) })
        .collect();
    let (last, others) =
        items.split_last().map_or((String::new(), items.as_slice()), |(a, b)| (a.clone(), b));
    let verb = draw.word(&["Make", "Write", "Give me"]);
    Program {
        request: format!("{verb} a list of {} and {last}.", others.join(", ")),
        code: format!("let list = [ {} ];", items.join(", ")),
    }
}

fn repetition(draw: &mut Draw) -> Program {
    let (what, times) = (name(draw), draw.between(2, 40));
    if draw.percent(40) {
        return Program { request: format!("Print {what}."), code: format!("print {what};") };
    }
    let request = match draw.below(2) {
        0 => format!("Print {what} {times} times."),
        _ => format!("Write a program that prints {what} {times} times."),
    };
    Program { request, code: format!("for i = 1 to {times} {{ print {what}; }}") }
}
