// What attention asks for while it computes one span: the keys and values of the next.

// What one kv head holds of one span.
template <class T>
struct SpanList {
  int origin;  // position of the span's first token
  int count;
  Chunk<T> chunks[kSpan];
};

template <class T>
class SpanAhead {
 public:
  explicit SpanAhead(const KVStore& kv)
      : block_size_(kv.block_size), head_size_(kv.head_size), do_weights_ask_(kIsScaled<T> && block_size_ % 16 == 0) {}

  // Chooses what is asked for while `current` is computed: keys and values of `following` by turns, since they lie
  // close together; where it is empty, anything that is there. What a longer one has more is asked for at once.
  // A target goes with each chunk of the current keys, then of its values. In between weights are made, of int8 values
  // in a quarter of the time. So that the memory is not idle meanwhile, every fourth chunk asks only for itself, and
  // each 16 weights for half a target.
  void list(const SpanList<T>& current, const SpanList<T>& following) {
    const SpanList<T>& asked = following.count > 0 ? following : current;
    count_ = current.count;
    begin_ = count_ > 0 ? current.chunks[0].begin : 0;
    int number = 0;
    const auto next = [&] {
      const int chunk = number / 2 < asked.count ? number / 2 : asked.count - 1;
      return target(asked.chunks[chunk], number++ % 2 == 1);
    };
    const auto list_chunks = [&](Target<T>* targets, bool is_values) {
      for (int i = 0; i < count_; ++i) {
        targets[i] = do_weights_ask_ && i % 4 == 3 ? target(current.chunks[i], is_values) : next();
      }
    };
    list_chunks(targets_, false);
    for (int i = 0; do_weights_ask_ && i < count_; i += 2) {
      const Target<T> at = i < count_ / 4 * 4 ? next() : target(current.chunks[i], true);
      halves_[i] = at;
      halves_[i + 1] = {at.elements + 8 * head_size_, at.scales};
    }
    list_chunks(targets_ + count_, true);
    for (int i = 2 * count_; i < 2 * asked.count; ++i) {
      const Target<T> at = target(asked.chunks[i / 2], i % 2 == 1);
      prefetch_elements(at.elements, 16 * head_size_);
      if (kIsScaled<T>) prefetch_l2(at.scales);
    }
  }

  // The targets of each chunk of the current keys, and of its values.
  const Target<T>* with_keys() const { return targets_; }
  const Target<T>* with_values() const { return targets_ + count_; }

  // While the weights of 16 tokens from t on are made for vector m of M: asks for a share of what goes with them.
  OCTAVO_INLINE void ask_with_weights(int t, int m, int M) const {
    if (!do_weights_ask_) return;
    constexpr int line = 64 / sizeof(T);
    const Target<T>& at = halves_[(t - begin_) / 16];
    const int lines = (8 * head_size_ + line - 1) / line, begin = lines * m / M, end = lines * (m + 1) / M;
    prefetch_elements(at.elements + begin * line, (end - begin) * line);
    if (m == 0) prefetch_l2(at.scales);
  }

 private:
  Target<T> target(const Chunk<T>& chunk, bool is_values) const {
    if (is_values) return {chunk.values, kIsScaled<T> ? chunk.scales + block_size_ : nullptr};
    return {chunk.values - int64_t{block_size_} * head_size_, chunk.scales};
  }

  const int block_size_, head_size_;
  const bool do_weights_ask_;  // not where a chunk may be shorter than 16 tokens
  int count_ = 0, begin_ = 0;  // chunks of the current span, its first token
  Target<T> targets_[2 * kSpan];
  Target<T> halves_[kSpan / 16];  // of targets, one for each 16 tokens
};
