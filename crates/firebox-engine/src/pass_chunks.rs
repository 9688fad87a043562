//! What a pass takes of each sequence and of each embedding.

use firebox_schedule::Client;

use crate::embedding_request::RunningEmbeddings;
use crate::prefill_chunks::{PrefillBudget, Prompt, prefill_chunks};
use crate::prefill_pacer::{PrefillPacer, WORTH_READING, Work};
use crate::recent_rows::Standing;
use crate::sequence::{Need, RequestId, Sequence};

/// How many tokens of every sequence a pass takes, and how many of each embedding.
#[derive(Debug)]
pub(crate) struct PassChunks {
    /// Tokens of each sequence; 0 if it is not in the pass.
    pub lengths: Vec<usize>,
    /// Tokens of the embeddings in the pass, in order of arrival.
    pub texts: Vec<(RequestId, usize)>,
}

/// How fast passes are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace<'p> {
    pub pacer: &'p PrefillPacer,
    /// Layers of the decoder.
    pub layers: usize,
    /// Seconds of a step with the rows that this pass decodes; 0 if they are not known.
    pub step: f64,
}

impl PassChunks {
    /// Divides the rows of a pass that serves `needs`. Requests in `in_pass` are in another pass, and of those that decode it
    /// has those in `decoding`.
    pub fn new(
        needs: &[Need],
        sequences: &[Sequence],
        embeddings: &RunningEmbeddings,
        in_pass: &[RequestId],
        decoding: &[RequestId],
        pace: Pace<'_>,
        standing: impl Fn(&Client) -> Standing,
    ) -> Self {
        let pacer = pace.pacer;
        let joins = |one: &Sequence| !one.held && needs.contains(&one.need()) && !in_pass.contains(&one.id);
        let (mut lengths, mut limit) = (vec![0; sequences.len()], usize::MAX);
        let mut prompts: Vec<(RequestId, Share, Prompt)> = Vec::new();
        for (at, one) in sequences.iter().enumerate().filter(|(_, one)| joins(one)) {
            if one.need() == Need::Decode {
                if decoding.contains(&one.id) {
                    lengths[at] = one.session.uncached_tokens();
                }
                continue;
            }
            let Sequence { id, session, client, priority, prefix_end, .. } = one;
            limit = limit.min(session.chunk());
            let before = session.cache().len();
            // A pass stops where recurrent states are to be cached for other requests.
            let rest = prefix_end.and_then(|end| end.checked_sub(before)).filter(|rest| *rest > 0);
            let tokens = rest.map_or(session.uncached_tokens(), |rest| rest.min(session.uncached_tokens()));
            let row = pacer.layer_seconds(Work::new(1, before));
            let prompt = Prompt { priority: *priority, tokens, row, standing: standing(client) };
            prompts.push((*id, Share::Sequence(at), prompt));
        }
        if needs.contains(&Need::Prefill) {
            for (id, prompt) in embeddings.prompts(pacer, &standing).filter(|(id, _)| !in_pass.contains(id)) {
                limit = embeddings.iter().map(|one| one.embedding.chunk()).fold(limit, usize::min);
                prompts.push((id, Share::Texts, prompt));
            }
        }
        // In order of arrival, of which the numbers of requests tell.
        prompts.sort_by_key(|(id, ..)| *id);
        let shares: Vec<Prompt> = prompts.iter().map(|(.., prompt)| *prompt).collect();
        let decodes = sequences.iter().any(|one| !one.held && one.need() == Need::Decode);
        let answers = prompts.iter().filter(|(_, share, _)| matches!(share, Share::Sequence(_)));
        let rows = rows_around(answers.map(|(.., prompt)| prompt.tokens));
        let budget = budget(needs, &shares, decodes, rows, pace).at_most(limit);
        let mut texts = Vec::new();
        for ((id, share, _), tokens) in prompts.into_iter().zip(prefill_chunks(budget, &shares)) {
            match share {
                Share::Sequence(at) => lengths[at] = tokens,
                Share::Texts if tokens > 0 => texts.push((id, tokens)),
                Share::Texts => {}
            }
        }
        Self { lengths, texts }
    }
}

/// Returns the most rows of a pass beside others, given the lengths of the prompts that wait for an answer: twice those of the
/// short ones, which have half of the rows or more. A pass that ends a short prompt ends soon.
fn rows_around(answers: impl Iterator<Item = usize> + Clone) -> usize {
    let Some(shortest) = answers.clone().min() else { return usize::MAX };
    let short = shortest.max(WORTH_READING as usize);
    let rows: usize = answers.filter(|tokens| *tokens <= short).sum();
    (2 * rows).max(WORTH_READING as usize)
}

/// What a share of a pass's rows is for.
#[derive(Debug)]
enum Share {
    /// The prompt of the sequence with this index.
    Sequence(usize),
    /// Texts that are embedded.
    Texts,
}

/// Returns how much of the prompts and texts a pass takes.
fn budget(needs: &[Need], prompts: &[Prompt], decoding: bool, rows: usize, pace: Pace<'_>) -> PrefillBudget {
    let Pace { pacer, layers, step } = pace;
    let row = prompts.iter().map(|prompt| prompt.row).fold(0.0, f64::max);
    let usual = match needs {
        // With several prompts, one may begin to decode while the pass of the others goes on.
        [Need::Prefill] if decoding || prompts.len() > 1 => pacer.beside(layers, row).at_most(rows),
        [Need::Prefill] => return pacer.alone(layers, row),
        // Weights that are streamed are read once for the whole pass.
        _ if decoding => pacer.joint(layers, step),
        _ => return PrefillBudget::ALL,
    };
    let Some(first) = prompts.iter().max_by_key(|prompt| prompt.standing.owed) else { return usual };
    let owed = pacer.alone(layers, row).at_most(first.standing.owed.min(first.tokens));
    if owed.rows_of(first) > usual.rows_of(first) { owed } else { usual }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use firebox_schedule::Priority;

    use super::*;

    #[test]
    fn a_pass_is_no_longer_than_its_shortest_prompts_need() {
        let rows = |answers: &[usize]| rows_around(answers.iter().copied());
        assert_eq!(rows(&[]), usize::MAX, "texts alone make full passes");
        assert_eq!(rows(&[1]), 32);
        assert_eq!(rows(&[24, 4000]), 48);
        assert_eq!(rows(&[24, 4000, 30, 5]), 118, "all short ones fit in half of it");
        assert_eq!(rows(&[4000, 900]), 1800);
    }

    #[test]
    fn a_prompt_that_is_owed_rows_gets_them_in_a_pass() {
        let mut pacer = PrefillPacer::default();
        let ms = Duration::from_millis;
        pacer.record_layer(Need::Decode, Work::new(1, 0), ms(5));
        pacer.record_pass(Need::Decode, ms(50));
        pacer.record_joint_layer(Work::new(8, 0), ms(13));
        let pace = Pace { pacer: &pacer, layers: 10, step: 0.03 };
        let of = |tokens, owed| {
            let standing = Standing { recent: 0.0, owed };
            let row = pacer.layer_seconds(Work::new(1, 0));
            Prompt { priority: Priority::Normal, tokens, row, standing }
        };
        let needs = [Need::Decode, Need::Prefill];
        let rows = |prompts: &[Prompt]| {
            let budget = budget(&needs, prompts, true, usize::MAX, pace);
            prompts.iter().map(|prompt| budget.rows_of(prompt)).max().unwrap_or_default()
        };
        let usual = rows(&[of(1000, 0)]);
        assert_eq!(usual, 3, "as long as a step of 30 ms has rows of 10 ms");
        assert_eq!(rows(&[of(1000, 0), of(24, 100)]), 24);
        assert_eq!(rows(&[of(24, 7)]), 7);
        assert_eq!(rows(&[of(24, 2)]), usual);
        assert_eq!(rows(&[of(1000, 900)]), 40, "a pass of 0.4 s");
    }
}
