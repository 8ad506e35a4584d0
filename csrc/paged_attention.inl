// Paged attention over any mix of rows.
//
// An item (attention_work.inl) runs span by span; within a span every tile of its query vectors reuses the keys and
// values just read. Where an item's spans are divided among workers, they leave each span's (acc, m, l) in the
// scratch memory and merge_attention joins them. Either way a span is computed alone and spans are joined in
// ascending order by the same operations, so that the division never shows in the result.

// The result of a span or of several: acc [D padded to 16], m, l. `kRecordTail` floats hold m and l.
constexpr int kRecordTail = 16;
OCTAVO_INLINE int padded_head(int head_size) { return (head_size + 15) / 16 * 16; }
OCTAVO_INLINE int record_floats(int head_size) { return padded_head(head_size) + kRecordTail; }

OCTAVO_INLINE int64_t worker_floats(int head_size) {
  return int64_t{kItemVectors} * padded_head(head_size)   // queries
         + int64_t{kItemVectors} * record_floats(head_size)   // joined results
         + int64_t{kTileVectors} * record_floats(head_size)   // one span's results
         + int64_t{kTileVectors} * kScoreStride
         + int64_t{kSpan / 4} * padded_head(head_size);  // int8 values of a span
}

static int64_t attention_scratch_bytes(int workers, int head_size, int64_t max_len) {
  const int64_t spans = (max_len + kSpan - 1) / kSpan;
  const int64_t divided = (workers - 1) * spans * kItemVectors * record_floats(head_size);
  return 4 * (workers * worker_floats(head_size) + divided);
}

// Joins the result `from` of the next span into `into`.
OCTAVO_INLINE void join(float* into, const float* from, int head_size) {
  const int width = padded_head(head_size);
  const float m0 = into[width], m1 = from[width];
  const float m = m0 > m1 ? m0 : m1;
  const f32x16 a = exp(broadcast(m0 - m)), b = exp(broadcast(m1 - m));
  for (int i = 0; i < width; i += 16) store(into + i, fma(load(from + i), b, load(into + i) * a));
  float factors[16];
  store(factors, fma(broadcast(from[width + 1]), b, broadcast(into[width + 1]) * a));
  into[width] = m;
  into[width + 1] = factors[0];
}

OCTAVO_INLINE void copy_record(float* to, const float* from, int head_size) {
  for (int i = 0; i < record_floats(head_size); i += 16) store(to + i, load(from + i));
}

// One call of paged_attention or merge_attention, as one worker sees it.
template <class T>
class AttentionRun {
 public:
  AttentionRun(const View& q, const KVStore& kv, const Batch& b, const Attention& a, const View& out, void* scratch,
               Worker w)
      : q_(q), kv_(kv), b_(b), a_(a), out_(out), group_size_(a.num_heads / kv.num_kv_heads),
        width_(padded_head(kv.head_size)), record_(record_floats(kv.head_size)), ahead_(kv) {
    float* mine = static_cast<float*>(scratch) + w.id * worker_floats(kv.head_size);
    queries_ = mine;
    joined_ = queries_ + int64_t{kItemVectors} * width_;
    result_ = joined_ + int64_t{kItemVectors} * record_;
    scores_ = result_ + int64_t{kTileVectors} * record_;
    regrouped_ = reinterpret_cast<uint8_t*>(scores_ + int64_t{kTileVectors} * kScoreStride);
    divided_ = static_cast<float*>(scratch) + w.count * worker_floats(kv.head_size);
    spans_ = (b.max_blocks * kv.block_size + kSpan - 1) / kSpan;
  }

  // Computes one part. `next` is the part that follows, or null: its first keys are asked for near the end.
  void run(const Part& part, const Part* next) {
    const Item& item = part.item;
    find_places(item);
    load_queries(item);
    const int count = (part.end_span - part.begin_span) * item.num_heads;  // each head of a span, then the next span
    list_span(item, 0, part.begin_span, &spans_listed_[0]);
    for (int i = 0; i < count; ++i) {
      SpanList<T> &current = spans_listed_[i % 2], &following = spans_listed_[(i + 1) % 2];
      following.count = 0;
      if (i + 1 < count) {
        list_span(item, (i + 1) % item.num_heads, part.begin_span + (i + 1) / item.num_heads, &following);
      } else if (next) {
        list_span(next->item, 0, next->begin_span, &following);
      }
      ahead_.list(current, following);
      const int span = part.begin_span + i / item.num_heads;
      run_span(item, i % item.num_heads, current, [&](int vector, const float* result) {
        float* joined = part.is_divided ? divided_record(part.first_owner, span, vector)
                                        : joined_ + int64_t{vector} * record_;
        if (part.is_divided || span == places_[vector].first / kSpan) {
          copy_record(joined, result, kv_.head_size);
        } else {
          join(joined, result, kv_.head_size);
        }
      });
    }
    if (part.is_divided) return;
    for (int v = 0; v < item.num_vectors(); ++v) finish(places_[v], joined_ + int64_t{v} * record_);
  }

  // Joins the spans of those vectors of a divided item for which is_mine() says so, which is asked for each in turn.
  template <class IsMine>
  void merge(const Item& item, int first_owner, const IsMine& is_mine) {
    find_places(item);
    for (int v = 0; v < item.num_vectors(); ++v) {
      if (!is_mine()) continue;
      const int first = places_[v].first / kSpan, last = places_[v].last / kSpan;
      copy_record(joined_, divided_record(first_owner, first, v), kv_.head_size);
      for (int span = first + 1; span <= last; ++span) {
        join(joined_, divided_record(first_owner, span, v), kv_.head_size);
      }
      finish(places_[v], joined_);
    }
  }

 private:
  // Where a vector stands, and that it sees the tokens [first, last].
  struct Place {
    int64_t row, column;
    int first, last;
  };

  // The places of an item's vectors, which are counted through it, head by head.
  void find_places(const Item& item) {
    Place* place = places_;
    for (int h = item.kv_head; h < item.kv_head + item.num_heads; ++h) {
      int row = b_.query_starts[item.seq] + item.begin / group_size_, head = item.begin % group_size_;
      for (int v = item.begin; v < item.end; ++v, ++place) {
        const int last = b_.positions[row];
        *place = {row, int64_t{h * group_size_ + head} * kv_.head_size, first_visible(last, a_.window), last};
        if (++head < group_size_) continue;
        head = 0;
        ++row;
      }
    }
  }

  float* divided_record(int first_owner, int span, int vector) const {
    return divided_ + ((first_owner * spans_ + span) * kItemVectors + vector) * record_;
  }

  // The item's queries side by side: in their own rows they lie far apart, often in the same set of the cache.
  void load_queries(const Item& item) {
    for (int v = 0; v < item.num_vectors(); ++v) {
      const float* from = q_.data + places_[v].row * q_.ld + places_[v].column;
      float* to = queries_ + int64_t{v} * width_;
      if constexpr (kIsScaled<T>) {
        int8_t* digits = reinterpret_cast<int8_t*>(to);
        extra_.queries[v] = to_digits(from, kv_.head_size, digits, digits + width_);
        extra_.queries[v].scale *= a_.scale;
        continue;
      }
      for (int d = 0; d < kv_.head_size; d += 16) {
        const int lanes = kv_.head_size - d < 16 ? kv_.head_size - d : 16;
        store(to + d, load_lanes(from + d, lanes) * broadcast(a_.scale));
      }
    }
  }

  // `head` is counted from the item's first.
  void list_span(const Item& item, int head, int span, SpanList<T>* list) const {
    const int64_t keys_begin = (item.kv_head + head) * kv_head_bytes(kv_.type, kv_.head_size, kv_.block_size) +
                               kv_scale_bytes(kv_.type, kv_.block_size);
    const HeadBlocks<T> blocks{b_.block_table + b_.table_rows[item.seq] * b_.max_blocks,
                               static_cast<const char*>(kv_.data) + keys_begin, kv_.block_bytes, kv_.block_size,
                               kv_.head_size};
    const int origin = span * kSpan;
    const int begin = item.first_token > origin ? (item.first_token - origin) / 16 * 16 : 0;
    const int end = item.last_token + 1 - origin < kSpan ? item.last_token + 1 - origin : kSpan;
    list->origin = origin;
    list->count = list_chunks(blocks, origin, begin, end, list->chunks);
  }

  // Computes every tile of one head on one span and calls take(vector, result) for each vector that sees some of it.
  template <class Take>
  OCTAVO_INLINE void run_span(const Item& item, int head, const SpanList<T>& list, const Take& take) {
    constexpr int tile = kIsScaled<T> ? kByteVectors : kTileVectors;
    if constexpr (kIsScaled<T>) {
      extra_.load_values(list.chunks, list.count, item.first_token - list.origin, kv_, regrouped_);
    }
    const int begin = head * item.num_per_head(), end = begin + item.num_per_head();
    for (int v = begin; v < end; v += tile) {
      const int count = end - v < tile ? end - v : tile;
      with_constant<tile>(count, [&](auto m) {
        if (v == begin) {
          run_tile<m.value, true>(v, list);
        } else {
          run_tile<m.value, false>(v, list);
        }
      });
      for (int m = 0; m < count; ++m) {
        if (visible_[m].begin < visible_[m].end) take(v + m, result_ + m * record_);
      }
    }
  }

  // Sets visible_ for a tile. Returns the tokens that some vector sees, and those that all see.
  template <int M>
  OCTAVO_INLINE void find_visible(int vector, int origin, Span* some, Span* all) {
    *some = {kSpan, 0};
    *all = {0, kSpan};
    for (int m = 0; m < M; ++m) {
      const int first = places_[vector + m].first, last = places_[vector + m].last;
      Span& seen = visible_[m];
      seen = {first > origin ? first - origin : 0, last + 1 - origin < kSpan ? last + 1 - origin : kSpan};
      if (seen.begin >= seen.end) seen = {0, 0};
      if (seen.end > 0 && seen.begin < some->begin) some->begin = seen.begin;
      if (seen.end > some->end) some->end = seen.end;
      if (seen.begin > all->begin) all->begin = seen.begin;
      if (seen.end < all->end) all->end = seen.end;
    }
    if (all->begin >= all->end) *all = {kSpan, kSpan};
  }

  template <int M, bool kAhead>
  __attribute__((noinline)) void run_tile(int vector, const SpanList<T>& list) {
    Span some, all;
    find_visible<M>(vector, list.origin, &some, &all);
    if (some.end == 0) return;
    score<M, kAhead>(vector, list, some);
    if constexpr (kIsScaled<T>) {
      const auto ask = [&](int m, int t) __attribute__((always_inline)) {
        if (kAhead) ahead_.ask_with_weights(t, m, M);
      };
      extra_.template weigh<M>(scores_, visible_, some, a_.softcap, result_ + width_, record_, ask);
      extra_.template mix<M, kAhead>(some, kv_.head_size, ahead_.with_values(), result_, record_);
    } else {
      for (int m = 0; m < M; ++m) {
        float *scores = scores_ + m * kScoreStride, *top = result_ + m * record_ + width_;
        softmax_span(scores, visible_[m], a_.softcap, top, top + 1, [&](int t, f32x16 p) { store(scores + t, p); });
      }
      mix<M, kAhead>(list, all);
    }
  }

  // Tokens before and after those that all see are mixed for each vector alone, in order.
  template <int M, bool kAhead>
  OCTAVO_INLINE void mix(const SpanList<T>& list, Span all) {
    for (int m = 0; m < M; ++m) {
      for (int i = 0; i < width_; i += 16) store(result_ + m * record_ + i, zero());
      mix_one(m, list, {visible_[m].begin, all.begin < visible_[m].end ? all.begin : visible_[m].end});
    }
    mix_all_columns<M, kAhead>(scores_, list.chunks, list.count, all, kv_.head_size, ahead_.with_values(), result_,
                               record_);
    for (int m = 0; m < M; ++m) mix_one(m, list, {all.end, visible_[m].end});
  }

  void mix_one(int m, const SpanList<T>& list, Span tokens) {
    mix_all_columns<1, false>(scores_ + m * kScoreStride, list.chunks, list.count, tokens, kv_.head_size,
                              ahead_.with_values(), result_ + m * record_, record_);
  }

  template <int M, bool kAhead>
  OCTAVO_INLINE void score(int vector, const SpanList<T>& list, Span some) {
    constexpr int chunks = kIsScaled<T> ? kByteChunks : kTileChunks;
    const float* queries = queries_ + int64_t{vector} * width_;
    int c = 0, count = list.count;
    while (c < count && list.chunks[c].end <= some.begin) ++c;
    while (count > c && list.chunks[count - 1].begin >= some.end) --count;
    const int head_size = kv_.head_size, piece = kv_piece(kv_.block_size);
    for (; c < count; c += chunks) {
      with_constant<chunks>(count - c < chunks ? count - c : chunks, [&](auto n) {
        if constexpr (kIsScaled<T>) {
          score_bytes<M, n.value, kAhead>(reinterpret_cast<const int8_t*>(queries), 4 * width_, width_,
                                          extra_.queries + vector, head_size, list.chunks + c, piece,
                                          ahead_.with_keys() + c, scores_);
        } else {
          score_chunks<M, n.value, kAhead>(queries, width_, head_size, list.chunks + c, piece, ahead_.with_keys() + c,
                                           scores_);
        }
      });
    }
  }

  // Stores a result, or where that is not wanted keeps it in the record until it is quantised.
  void finish(const Place& place, float* record) {
    float* to = out_.data ? out_.data + place.row * out_.ld + place.column : record;
    const f32x16 sum = broadcast(record[width_ + 1]);
    for (int d = 0; d < kv_.head_size; d += 16) {
      store_lanes(to + d, kv_.head_size - d < 16 ? kv_.head_size - d : 16, load(record + d) / sum);
    }
    if (!a_.quantized.q) return;
    with_group(a_.quantized.group, [&](auto group) {
      for (int d = 0; d < kv_.head_size; d += group.size) {
        const int g = static_cast<int>(place.column + d) / group.size;
        quantize_group_of<group.size>(to + d, out_.width, place.row, g, a_.quantized);
      }
    });
  }

  const View& q_;
  const KVStore& kv_;
  const Batch& b_;
  const Attention& a_;
  const View& out_;
  const int group_size_;
  const int width_, record_;  // floats
  float* queries_;
  float* joined_;   // [kItemVectors] records
  float* result_;   // [kTileVectors] records
  float* scores_;   // [kTileVectors][kScoreStride]
  float* divided_;  // [first owner][span][vector] records of divided items
  uint8_t* regrouped_;  // [kSpan/4][D][4] of int8 values
  typename ExtraOf<T>::type extra_;
  int64_t spans_;
  Place places_[kItemVectors];
  Span visible_[kTileVectors];
  SpanList<T> spans_listed_[2];
  SpanAhead<T> ahead_;
};

template <class T>
static bool attend(const View& q, const KVStore& kv, const Batch& b, const Attention& a, const View& out,
                   void* scratch, Worker w) {
  AttentionRun<T> run(q, kv, b, a, out, scratch, w);
  Part held;
  bool is_holding = false;
  const bool any_divided = Division(b, a, kv.num_kv_heads, w).each_part([&](const Part& part) {
    if (is_holding) run.run(held, &part);
    held = part;
    is_holding = true;
  });
  if (is_holding) run.run(held, nullptr);
  return any_divided;
}

static bool paged_attention(const View& q, const KVStore& kv, const Batch& b, const Attention& a, const View& out,
                            void* scratch, Worker w) {
  if (kv.type == KVType::i8) return attend<uint8_t>(q, kv, b, a, out, scratch, w);
  if (kv.type == KVType::f16) return attend<uint16_t>(q, kv, b, a, out, scratch, w);
  return attend<float>(q, kv, b, a, out, scratch, w);
}

static void merge_attention(const View& q, const KVStore& kv, const Batch& b, const Attention& a, const View& out,
                            void* scratch, Worker w) {
  AttentionRun<float> run(q, kv, b, a, out, scratch, w);  // results are float whatever is stored
  int next = 0;
  Division(b, a, kv.num_kv_heads, w).each_divided([&](const Item& item, int first_owner) {
    run.merge(item, first_owner, [&] { return next++ % w.count == w.id; });
  });
}
