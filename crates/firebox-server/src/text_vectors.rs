//! The vectors of texts, as they are computed: by the engine if the model generates text, else by an encoder.

use std::future::poll_fn;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use firebox_engine::{EngineError, Event, ResponseStream};
use firebox_runtime::{EmbedOptions, TextVector};
use firebox_text::Tokenizer;
use futures_core::Stream as _;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use crate::app::App;
use crate::blocking::{blocking, with_permit};
use crate::catalog::SelectedModel;
use crate::error::ApiError;
use crate::prompt_length;
use crate::served_model::ServedModel;

/// Tokens of a batch of an encoder, after which another request may run. As many as one forward pass takes.
const BATCH_TOKENS: usize = 1024;

/// Batches of vectors that an encoder's request holds: one that is computed, one that waits, and one that is sent.
const HELD_BATCHES: usize = 3;

/// The vectors of texts, in order. Dropping it cancels what is not computed yet.
#[derive(Debug)]
pub(crate) struct TextVectors {
    source: Source,
    /// Tokens of all texts.
    pub tokens: usize,
}

#[derive(Debug)]
enum Source {
    Engine(ResponseStream),
    Encoder(Receiver<Result<Vec<TextVector>, ApiError>>),
}

impl TextVectors {
    /// Asks for the vectors of texts.
    pub async fn begin(
        app: &Arc<App>,
        selected: &SelectedModel,
        scope: String,
        texts: Vec<String>,
        options: EmbedOptions,
    ) -> Result<Self, ApiError> {
        let served = selected.served.clone();
        if served.context.is_none() {
            return Self::begin_encoder(app, served, &scope, texts, options).await;
        }
        let of = served.clone();
        let bytes = texts.iter().map(String::len).sum();
        let embed = move || {
            check_each(of.tokenizer()?, &texts, of.context)?;
            Ok(of.model.embedding(&texts, &options)?)
        };
        let embedding = app.over_text(&scope, bytes, embed).await?;
        let tokens = embedding.tokens();
        let client = app.client(&scope);
        let request = served.embedding_request(embedding).in_scope(scope).for_client(client);
        Ok(Self { source: Source::Engine(app.engine.generate(request)), tokens })
    }

    async fn begin_encoder(
        app: &Arc<App>,
        served: Arc<ServedModel>,
        scope: &str,
        texts: Vec<String>,
        options: EmbedOptions,
    ) -> Result<Self, ApiError> {
        let place = encoder_place(app)?;
        let texts = Arc::new(texts);
        let lengths = lengths(app, scope, served.tokenizer()?, &texts).await?;
        let tokens = lengths.iter().sum();
        let held = HELD_BATCHES * texts.len().min(BATCH_TOKENS) * served.model.embedding_width();
        let model = served.model.clone();
        let paid = blocking(move || Ok(model.pay_for((held * size_of::<f32>()) as u64)?)).await?;
        let (sender, receiver) = channel(1);
        let app = app.clone();
        tokio::spawn(async move {
            let _held = (place, paid);
            for range in batches(&lengths) {
                let vectors = tokio::select! {
                    vectors = encoded(&app, &served, &texts, range, options) => vectors,
                    () = sender.closed() => return,
                };
                if !sent(&sender, vectors).await {
                    return;
                }
            }
        });
        Ok(Self { source: Source::Encoder(receiver), tokens })
    }

    /// Polls for the next vectors; `None` once there are all.
    pub fn poll_next(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Vec<TextVector>, ApiError>>> {
        let stream = match &mut self.source {
            Source::Encoder(receiver) => return receiver.poll_recv(context),
            Source::Engine(stream) => stream,
        };
        loop {
            return Poll::Ready(match ready!(Pin::new(&mut *stream).poll_next(context)) {
                Some(Event::Vectors(vectors)) => Some(Ok(vectors)),
                Some(Event::Failed(failure)) => Some(Err(failure.error.into())),
                Some(Event::Embedded(_)) => None,
                Some(_) => continue,
                None => Some(Err(EngineError::EngineOver.into())),
            });
        }
    }

    /// Waits for the next vectors.
    pub async fn next(&mut self) -> Option<Result<Vec<TextVector>, ApiError>> {
        poll_fn(|context| self.poll_next(context)).await
    }
}

/// Takes one of the places of encoders' requests, or refuses the request.
pub(crate) fn encoder_place(app: &App) -> Result<tokio::sync::OwnedSemaphorePermit, ApiError> {
    app.encoder_places.clone().try_acquire_owned().map_err(|_| {
        ApiError::too_many("as many requests for vectors wait as may; ask again later, or start the server with a longer --queue")
    })
}

/// Computes the vectors of a batch once no other batch is computed.
async fn encoded(
    app: &App,
    served: &Arc<ServedModel>,
    texts: &Arc<Vec<String>>,
    range: Range<usize>,
    options: EmbedOptions,
) -> Result<Vec<TextVector>, ApiError> {
    let (served, texts, first) = (served.clone(), texts.clone(), range.start);
    let embed = move || {
        let vectors = served.model.embed(&texts[range], &options)?;
        let numbered = vectors.into_iter().enumerate();
        Ok(numbered.map(|(at, vector)| TextVector::new(first + at, vector)).collect())
    };
    with_permit(&app.encoder_permits, embed).await
}

/// Sends vectors, and returns whether more are wanted.
async fn sent(
    sender: &Sender<Result<Vec<TextVector>, ApiError>>,
    vectors: Result<Vec<TextVector>, ApiError>,
) -> bool {
    let failed = vectors.is_err();
    sender.send(vectors).await.is_ok() && !failed
}

/// Returns the length of each text in tokens.
pub(crate) async fn lengths(
    app: &App,
    scope: &str,
    tokenizer: &Arc<Tokenizer>,
    texts: &Arc<Vec<String>>,
) -> Result<Vec<usize>, ApiError> {
    let bytes = texts.iter().map(String::len).sum();
    let (tokenizer, texts) = (tokenizer.clone(), texts.clone());
    let measure = move || {
        check_each(&tokenizer, &texts, None)?;
        texts.iter().map(|text| Ok(tokenizer.encode_literal(text, true)?.len())).collect()
    };
    app.over_text(scope, bytes, measure).await
}

/// Refuses texts of which one is far too long.
fn check_each(tokenizer: &Tokenizer, texts: &[String], context: Option<usize>) -> Result<(), ApiError> {
    texts.iter().try_for_each(|text| prompt_length::check_text(tokenizer, text, context))
}

/// Splits texts into consecutive batches.
pub(crate) fn batches(lengths: &[usize]) -> Vec<Range<usize>> {
    let (mut batches, mut start, mut tokens) = (Vec::new(), 0, 0);
    for (at, length) in lengths.iter().enumerate() {
        if at > start && tokens + length > BATCH_TOKENS {
            batches.push(start..at);
            (start, tokens) = (at, 0);
        }
        tokens += length;
    }
    if start < lengths.len() {
        batches.push(start..lengths.len());
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_has_at_most_the_tokens_of_one_pass() {
        assert!(batches(&[]).is_empty());
        assert_eq!(batches(&[5000, 1]), [0..1, 1..2]);
        assert_eq!(batches(&[1000, 24, 1, 3000, 7]), [0..2, 2..3, 3..4, 4..5]);
        assert_eq!(batches(&[1; 3000]), [0..1024, 1024..2048, 2048..3000]);
    }
}
