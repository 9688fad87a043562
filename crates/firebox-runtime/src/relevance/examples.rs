//! Sentence pairs to calibrate scorers with.

use firebox_text::TextError;

use super::{LabelledPair, TurnContent};

/// A message and an earlier turn about one topic, with its answer. No two lines share a topic.
const ABOUT_THE_SAME: [(&str, &str); 24] = [
    (
        "Which wine goes with the lamb?",
        "I am roasting a leg of lamb with rosemary for dinner on Saturday.\n\
         Give it an hour and a half at 180 degrees and let the meat rest before you carve it.",
    ),
    (
        "Does the borrow checker complain because of the loop?",
        "My Rust function takes a mutable reference and does not compile.\n\
         The reference is borrowed twice: end the first borrow before the second begins.",
    ),
    (
        "How many days should we stay in Kyoto?",
        "We are planning a trip to Japan in April to see the cherry blossoms.\n\
         Early April is best for Tokyo, and temples and gardens are beautiful then.",
    ),
    (
        "Will it need antibiotics?",
        "Our cat does not eat, and the vet said it has an infected tooth.\n\
         The tooth will probably be pulled, and the animal gets something against the pain.",
    ),
    (
        "What interest rate can I expect?",
        "I want to take out a mortgage to buy a small flat.\n\
         Banks will ask for a fifth of the price as a deposit and proof of your income.",
    ),
    (
        "Can the roots have rotted?",
        "The leaves of my houseplant turn yellow although I water it every day.\n\
         That is too much water; let the soil dry and check the pot for drainage.",
    ),
    (
        "Who did he play against in the final?",
        "Federer won Wimbledon for the first time in 2003.\n\
         Yes, it was the first of his twenty major tennis titles.",
    ),
    (
        "Should I replace the pads too?",
        "My car squeaks whenever I brake, and the discs look worn.\n\
         Worn brake discs should be changed in pairs, and a garage does it within an hour.",
    ),
    (
        "How far away are the oldest galaxies it has seen?",
        "The James Webb observatory has taken new pictures of deep space.\n\
         Its infrared mirror collects light that left early stars billions of years ago.",
    ),
    (
        "Is it safe to run on it again?",
        "I sprained my ankle two weeks ago and it is still swollen.\n\
         Keep the foot raised, cool it and avoid sports until the swelling is gone.",
    ),
    (
        "What key is that piece in?",
        "I practise the prelude of Bach's first cello suite every evening.\n\
         Play the broken chords slowly at first and keep the bow close to the string.",
    ),
    (
        "Would an index on the date help?",
        "This SQL query over our orders table takes forty seconds.\n\
         The database reads every row; show me the query plan and the columns it filters by.",
    ),
    (
        "Why did the empire fall apart?",
        "In school we learn about Rome and its last emperors.\n\
         In the fifth century the western Roman provinces were lost one after the other.",
    ),
    (
        "Is the landlord allowed to keep the deposit?",
        "I moved out of my rented apartment and there was a scratch in the floor.\n\
         Ordinary wear is included in the rent, but damage can be charged to the tenant.",
    ),
    (
        "Which yeast is best for the dough?",
        "My sourdough bread does not rise and comes out of the oven dense.\n\
         Feed the starter twice a day and let the loaf proof in a warm place.",
    ),
    (
        "Do they really dance to tell the others where flowers are?",
        "My neighbour keeps bees and gave us a jar of honey.\n\
         A hive has up to fifty thousand bees, and most of them are workers.",
    ),
    (
        "How should I begin the cover letter?",
        "I am applying for a job as a junior accountant.\n\
         Adapt your CV to the position and mention the software you have worked with.",
    ),
    (
        "Did the detective suspect the widow?",
        "I am reading a novel by Agatha Christie in which a colonel is murdered.\n\
         In her mysteries every guest in the house has a motive for the crime.",
    ),
    (
        "Will the panels pay off in ten years?",
        "We think about putting solar cells on our roof and a battery in the cellar.\n\
         That depends on the price of electricity and how much of the power you use yourself.",
    ),
    (
        "At what age do children start to talk?",
        "Our baby daughter babbles all day but says no words.\n\
         Babies understand far more than they can say; read to her and name things.",
    ),
    (
        "Is a wool sleeping bag warm enough?",
        "We want to camp in the mountains in October, and nights may freeze.\n\
         Take a tent for three seasons and a mat that keeps the cold of the ground away.",
    ),
    (
        "How do I get rid of the negative exponent?",
        "My algebra homework asks to simplify fractions with powers.\n\
         Multiply numerator and denominator by the same power and add the exponents.",
    ),
    (
        "Did the king sign it freely?",
        "Magna Carta limited what English monarchs could do to their barons.\n\
         It was agreed at Runnymede in 1215, under the threat of a civil war.",
    ),
    (
        "Should the passwords be hashed with salt?",
        "I am building a login page for a web shop and store user accounts.\n\
         Never keep what users type in plain text, and limit how often they may try.",
    ),
];

/// The distance in lines to the turn that makes an unrelated pair with a message.
const LINES_APART: [usize; 2] = [7, 16];

/// Pairs to calibrate scorers with, as text and as tokens.
pub(super) struct Examples(Vec<[(&'static str, Vec<u32>); 2]>);

/// Returns the pairs with tokens.
pub(super) fn tokenized(tokens: impl Fn(&str) -> Result<Vec<u32>, TextError>) -> Result<Examples, TextError> {
    let both = |text| Ok((text, tokens(text)?));
    let lines = ABOUT_THE_SAME.iter().map(|&(newest, earlier)| Ok([both(newest)?, both(earlier)?]));
    lines.collect::<Result<_, _>>().map(Examples)
}

/// Returns the pairs as text only.
pub(super) fn untokenized() -> Examples {
    let lines = ABOUT_THE_SAME.iter();
    Examples(lines.map(|&(newest, earlier)| [(newest, Vec::new()), (earlier, Vec::new())]).collect())
}

impl Examples {
    pub fn pairs(&self) -> Vec<LabelledPair<'_>> {
        let Self(lines) = self;
        let content = |line: usize, side: usize| {
            let (text, tokens) = &lines[line % lines.len()][side];
            TurnContent { text, tokens }
        };
        let pair = |line: usize, apart: usize| LabelledPair {
            newest: content(line, 0),
            earlier: content(line + apart, 1),
            related: apart == 0,
        };
        (0..lines.len())
            .flat_map(|line| [0].into_iter().chain(LINES_APART).map(move |apart| (line, apart)))
            .map(|(line, apart)| pair(line, apart))
            .collect()
    }
}
