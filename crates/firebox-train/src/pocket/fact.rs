//! Facts: who or what, which of its properties, and the value; how they are told, asked for, and answered in each style.

use super::Split;
use super::draw::Draw;
use super::words;

/// Whom or what a fact is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Owner {
    User,
    Person(String),
    Thing(&'static str),
}

/// Which property of its owner a fact names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Property {
    Kin(&'static str),
    Colour,
    Home,
    Job,
    Age,
    Likes,
    Plays,
    Name,
    Place,
    Day,
    Word,
}

/// In whose words a fact is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Voice {
    /// The system prompt speaks of the user.
    System,
    /// The user speaks of themselves.
    User,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fact {
    pub owner: Owner,
    pub property: Property,
    pub value: String,
}

const OF_PEOPLE: &[(usize, Property)] = &[
    (2, Property::Colour),
    (3, Property::Home),
    (2, Property::Job),
    (2, Property::Age),
    (2, Property::Likes),
    (2, Property::Plays),
];

impl Owner {
    /// At the start of a sentence, or alone.
    pub(super) fn named(&self) -> String {
        match self {
            Self::User => "You".to_owned(),
            Self::Person(name) => name.clone(),
            Self::Thing(thing) => format!("The {thing}"),
        }
    }

    fn in_code(&self) -> &str {
        match self {
            Self::User => "me",
            Self::Person(name) => name,
            Self::Thing(thing) => thing,
        }
    }

    /// Inside a question of the user.
    pub(super) fn asked(&self) -> String {
        match self {
            Self::User => "me".to_owned(),
            Self::Person(name) => name.clone(),
            Self::Thing(thing) => format!("the {thing}"),
        }
    }
}

impl Property {
    fn key(self) -> &'static str {
        match self {
            Self::Kin(kin) => kin,
            Self::Colour => "colour",
            Self::Home => "home",
            Self::Job => "job",
            Self::Age => "age",
            Self::Likes => "likes",
            Self::Plays => "plays",
            Self::Name => "name",
            Self::Place => "place",
            Self::Day => "day",
            Self::Word => "word",
        }
    }

    /// A property that `owner` may have.
    pub(super) fn draw(owner: &Owner, draw: &mut Draw) -> Self {
        match owner {
            Owner::Thing(thing) if words::EVENTS.contains(thing) => Self::Day,
            Owner::Thing(thing) if words::SECRETS.contains(thing) => Self::Word,
            Owner::Thing(_) => Self::Place,
            Owner::User if draw.percent(20) => Self::Name,
            Owner::User | Owner::Person(_) if draw.percent(40) => Self::Kin(draw.word(words::KIN)),
            Owner::User | Owner::Person(_) => draw.weighted(OF_PEOPLE),
        }
    }

    fn value(self, draw: &mut Draw) -> String {
        match self {
            Self::Kin(_) => words::companion(draw),
            Self::Name => words::person(draw),
            Self::Home => words::town(draw),
            Self::Word if draw.percent(30) => draw.between(10, 999).to_string(),
            Self::Word => words::made_up(draw),
            Self::Age => draw.between(2, 99).to_string(),
            Self::Colour => draw.word(words::COLOURS).to_owned(),
            Self::Job => draw.word(words::JOBS).to_owned(),
            Self::Likes => draw.word(words::FOODS).to_owned(),
            Self::Plays => draw.word(words::INSTRUMENTS).to_owned(),
            Self::Place => draw.word(words::PLACES).to_owned(),
            Self::Day => draw.word(words::DAYS).to_owned(),
        }
    }
}

impl Fact {
    /// A fact of `split` about `owner`; none if no value in a few tries makes one, as short lists of values may not.
    pub(super) fn draw(owner: &Owner, property: Property, split: Split, draw: &mut Draw) -> Option<Self> {
        (0..32)
            .map(|_| Self { owner: owner.clone(), property, value: property.value(draw) })
            .find(|fact| Split::of(&fact.in_code()) == split)
    }

    /// Returns whether both are about the same property of the same owner, so that the later one replaces the earlier.
    pub(super) fn same_subject(&self, other: &Self) -> bool {
        self.owner == other.owner && self.property == other.property
    }

    /// The statement of the fact in the words of `voice`.
    pub(super) fn told(&self, voice: Voice, draw: &mut Draw) -> String {
        let (owner, owners, first) = match (&self.owner, voice) {
            (Owner::User, Voice::User) => ("I".to_owned(), "My".to_owned(), true),
            (Owner::User, Voice::System) => ("The user".to_owned(), "The user's".to_owned(), false),
            (other, _) => (other.named(), format!("{}'s", other.named()), false),
        };
        let verb = |base: &str| if first { base.to_owned() } else { format!("{base}s") };
        let (is, has) = if first { ("am", "have") } else { ("is", "has") };
        let value = &self.value;
        match self.property {
            Property::Kin(kin) => match draw.below(4) {
                0 => format!("{owner} {has} a {kin} called {value}."),
                1 => format!("{owner} {has} a {kin} named {value}."),
                2 => format!("The name of {} {kin} is {value}.", lowered(&owners, first)),
                _ => format!("{owners} {kin} is called {value}."),
            },
            Property::Colour => match draw.below(4) {
                0 => format!("{owners} favorite color is {value}."),
                1 => format!("{owner} {} the colour {value}.", verb("love")),
                _ => format!("{owners} favourite colour is {value}."),
            },
            Property::Home => match draw.below(3) {
                0 => format!("{owners} home is in {value}."),
                1 => format!("{owner} {is} from {value}."),
                _ => format!("{owner} {} in {value}.", verb("live")),
            },
            Property::Job => match draw.below(3) {
                0 => format!("{owner} {} as a {value}.", verb("work")),
                1 => format!("{owners} job is {value}."),
                _ => format!("{owner} {is} a {value}."),
            },
            Property::Age => match draw.below(3) {
                0 => format!("{owners} age is {value}."),
                _ => format!("{owner} {is} {value} years old."),
            },
            Property::Likes => match draw.below(2) {
                0 => format!("{owner} {} {value}.", verb("love")),
                _ => format!("{owner} {} {value}.", verb("like")),
            },
            Property::Plays => format!("{owner} {} the {value}.", verb("play")),
            Property::Name => match draw.below(4) {
                0 => format!("{owner} {is} called {value}."),
                1 if first => format!("Call me {value}."),
                2 => format!("{owner} {is} {value}."),
                _ => format!("{owners} name is {value}."),
            },
            Property::Place => match draw.below(3) {
                0 if voice == Voice::User => {
                    format!("I put {} in the {value}.", self.owner.asked())
                }
                1 => format!("{owner} is now in the {value}."),
                _ => format!("{owner} is in the {value}."),
            },
            Property::Day => match draw.below(3) {
                0 => format!("{owner} will be on {value}."),
                _ => format!("{owner} is on {value}."),
            },
            Property::Word => format!("{owner} is {value}."),
        }
    }

    /// The user's question for this fact.
    pub(super) fn asked(&self, draw: &mut Draw) -> String {
        let me = self.owner == Owner::User;
        let owner = if me { "I".to_owned() } else { self.owner.asked() };
        let owners = if me { "my".to_owned() } else { format!("{owner}'s") };
        let (does, is) = if me { ("do", "am") } else { ("does", "is") };
        match self.property {
            Property::Kin(kin) => match draw.below(5) {
                0 => format!("What is {owners} {kin} called?"),
                1 => format!("What is the name of {owners} {kin}?"),
                2 => format!("Who is {owners} {kin}?"),
                3 => format!("Do you remember the name of {owners} {kin}?"),
                _ => format!("What is {owners} {kin}'s name?"),
            },
            Property::Colour => match draw.below(3) {
                0 => format!("What is {owners} favourite colour?"),
                1 => format!("What is {owners} favorite color?"),
                _ => format!("Which colour {does} {owner} love?"),
            },
            Property::Home => match draw.below(4) {
                0 => format!("Where {does} {owner} live?"),
                1 => format!("Where {is} {owner} from?"),
                2 => format!("Which town {does} {owner} live in?"),
                _ => format!("Where is {owners} home?"),
            },
            Property::Job => match draw.below(3) {
                0 => format!("What is {owners} job?"),
                1 => format!("What {does} {owner} work as?"),
                _ => format!("What {does} {owner} do?"),
            },
            Property::Age => match draw.below(4) {
                0 => format!("Do you know {owners} age?"),
                1 => format!("What is {owners} age?"),
                _ => format!("How old {is} {owner}?"),
            },
            Property::Likes => match draw.below(2) {
                0 => format!("What {does} {owner} like?"),
                _ => format!("What {does} {owner} love?"),
            },
            Property::Plays => format!("What {does} {owner} play?"),
            Property::Name => match draw.below(6) {
                0 => "Who am I?".to_owned(),
                1 => "Do you know my name?".to_owned(),
                2 => "What am I called?".to_owned(),
                3 => "Do you remember my name?".to_owned(),
                _ => "What is my name?".to_owned(),
            },
            Property::Place => match draw.below(4) {
                0 => format!("Where did I put {owner}?"),
                1 => format!("Do you know where {owner} is?"),
                _ => format!("Where is {owner}?"),
            },
            Property::Day => match draw.below(2) {
                0 => format!("When is {owner}?"),
                _ => format!("On which day is {owner}?"),
            },
            Property::Word => match draw.below(4) {
                0 => format!("Do you know {owner}?"),
                1 => format!("Tell me {owner}."),
                _ => format!("What is {owner}?"),
            },
        }
    }

    /// One sentence of the model to the user: the style of the chat head.
    pub(super) fn sentence(&self) -> String {
        let you = self.owner == Owner::User;
        let owner = self.owner.named();
        let owners = if you { "Your".to_owned() } else { format!("{owner}'s") };
        let verb = |base: &str| if you { base.to_owned() } else { format!("{base}s") };
        let is = if you { "are" } else { "is" };
        let value = &self.value;
        match self.property {
            Property::Kin(kin) => format!("{owners} {kin} is called {value}."),
            Property::Colour => format!("{owners} favourite colour is {value}."),
            Property::Home => format!("{owner} {} in {value}.", verb("live")),
            Property::Job => format!("{owner} {} as a {value}.", verb("work")),
            Property::Age => format!("{owner} {is} {value} years old."),
            Property::Likes => format!("{owner} {} {value}.", verb("like")),
            Property::Plays => format!("{owner} {} the {value}.", verb("play")),
            Property::Name => format!("Your name is {value}."),
            Property::Place => format!("{owner} is in the {value}."),
            Property::Day => format!("{owner} is on {value}."),
            Property::Word => format!("{owner} is {value}."),
        }
    }

    /// As much of [the sentence](Self::sentence) as can be said without knowing the value.
    pub(super) fn sentence_before_value(&self) -> String {
        let sentence = Self { value: "\0".to_owned(), ..self.clone() }.sentence();
        sentence.split(" \0").next().unwrap_or_default().to_owned()
    }

    /// The style of the code head when it is told the fact. It also identifies the fact.
    pub(super) fn in_code(&self) -> String {
        format!("let {}.{} = {};", self.owner.in_code(), self.property.key(), self.value)
    }

    /// The style of the code head when it is asked for the fact.
    pub(super) fn printed(&self, value: &str) -> String {
        format!("print {}.{}; // {value}", self.owner.in_code(), self.property.key())
    }

    /// The style of the summarize head, without the full stop.
    pub(super) fn noted(&self, value: &str) -> String {
        format!("{}: {} {value}", self.owner.named(), self.property.key())
    }
}

fn lowered(owners: &str, first: bool) -> String {
    if first { "my".to_owned() } else { owners.replacen("The user", "the user", 1) }
}
