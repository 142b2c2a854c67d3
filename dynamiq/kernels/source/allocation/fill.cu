// How many rows take each step to a wider code: the price at which the bytes are used up.
#include "team.cuh"

struct Arguments {
    const double* weights;  // [deals, rows], the last ones 0
    const double* worth;    // [classes, steps, bands]
    const int64_t* bands;   // [rows], the band of each
    const int64_t* costs;   // [classes, steps]
    const int64_t* room;    // [deals, 1] if classes share it, or [deals, classes]
    double* prices;         // [deals, classes, steps, rows], memory to work in
    int64_t* more;          // [deals, classes, steps], memory to work in
    int64_t* cuts;          // [deals, classes, steps]
    int64_t classes, steps, rows, band_count;
    int64_t is_shared;
};

// The bits of 2^-300, 2^300 and infinity.
#define LEAST_PRICE 0x2D30000000000000ll
#define GREATEST_PRICE 0x52B0000000000000ll
#define INFINITE_PRICE 0x7FF0000000000000ll
// Up to which all rows are looked at rather than searched.
#define FEW_ROWS 8

INLINE double double_of_bits(int64_t bits) {
#ifdef __CUDACC__
    return __longlong_as_double(bits);
#else
    double r;
    memcpy(&r, &bits, 8);
    return r;
#endif
}

// The classes that share one room: all of a deal's, or one. A list holds, in ascending order, the
// prices up to which the rows of a class take a step; a class's lists follow each other.
struct Market {
    int64_t steps, rows, lists;
    const int64_t* costs;
    double* prices;

    INLINE_MEMBER double* list(int64_t i) const { return prices + i * rows; }

    // How many rows take a step at a price; a search without branches, which nobody could predict.
    INLINE_MEMBER int64_t bought(int64_t i, double price) const {
        const double* ascending = list(i);
        if (rows <= FEW_ROWS) {
            int64_t count = 0;
            for (int64_t row = 0; row < rows; ++row) count += ascending[row] >= price;
            return count;
        }
        int64_t below = 0;
        for (int64_t left = rows; left > 0;) {
            int64_t half = (left + 1) / 2;
            below += half * (ascending[below + half - 1] < price);
            left -= half;
        }
        return rows - below;
    }

    // What all steps cost at a price.
    INLINE_MEMBER int64_t spent(int64_t price_bits) const {
        double price = double_of_bits(price_bits);
        int64_t sum = 0;
        FOR_EACH_PART(i, lists) { sum += bought(i, price) * costs[i]; }
        return sum_of_parts(sum);
    }
};

INLINE void write_prices(const Market& m, const Arguments& a, int64_t deal, int64_t first) {
    const double* weights = a.weights + deal * m.rows;
    FOR_EACH_PART(i, m.lists) {
        const double* worth = a.worth + (first + i) * a.band_count;
        double* ascending = m.list(i);
        double least = 0;
        for (int64_t row = 0; row < m.rows; ++row) {
            // The first step is taken at any price.
            bool is_first = i % m.steps == 0, is_live = weights[row] > 0;
            double pays = weights[row] / worth[a.bands[row]];
            if (is_first) pays = is_live ? double_of_bits(INFINITE_PRICE) : 0;
            // Widths do not increase from row to row.
            least = row && !(pays < least) ? least : pays;
            ascending[m.rows - 1 - row] = least;
        }
    }
    synchronize();
}

// Buys in turn what fits: what is wanted at one price, but not at another one nearly the same.
INLINE void add_what_fits(const Market& m, int64_t* cuts, const int64_t* more, int64_t room) {
    for (int64_t i = 0; i < m.lists; ++i) {
        int64_t fits = room > 0 ? room / m.costs[i] : 0;
        cuts[i] += fits < more[i] ? fits : more[i];
        room -= more[i] * m.costs[i];
        // No row takes a step without the one before.
        if (i % m.steps && cuts[i] > cuts[i - 1]) cuts[i] = cuts[i - 1];
    }
}

// The dearest steps of a class that still fit, where costs differ.
INLINE void spend_change(const Market& m, int64_t* cuts, int64_t room) {
    const int64_t* costs = m.costs;
    bool differ = false;
    for (int64_t i = 2; i < m.steps; ++i) differ |= costs[i] != costs[1];
    if (!differ || !m.rows) return;
    for (int64_t i = 0; i < m.steps; ++i) room -= cuts[i] * costs[i];
    for (int64_t turn = 1, last = 0; turn < m.steps; ++turn) {
        int64_t next = 0;
        for (int64_t i = 1; i < m.steps; ++i) {
            bool is_left = !last || costs[i] < costs[last] || (costs[i] == costs[last] && i > last);
            if (is_left && (!next || costs[i] > costs[next])) next = i;
        }
        last = next;
        // A step that never pays gives a greater error.
        if (!(m.list(next)[m.rows - 1] > 0)) continue;
        int64_t fits = room / costs[next], free = cuts[next - 1] - cuts[next];
        fits = fits < free ? fits : free;
        cuts[next] += fits;
        room -= fits * costs[next];
    }
}

INLINE void fill_at(const Arguments& a, int64_t index, const Ahead&) {
    int64_t deal = a.is_shared ? index : index / a.classes;
    int64_t first = a.is_shared ? 0 : (index - deal * a.classes) * a.steps;
    int64_t from = deal * a.classes * a.steps + first, room = a.room[index];
    Market m = {a.steps, a.rows, a.is_shared ? a.classes * a.steps : a.steps, a.costs + first,
                a.prices + from * a.rows};
    write_prices(m, a, deal, first);
    int64_t low = LEAST_PRICE, high = GREATEST_PRICE;
    int64_t at_low = m.spent(low), at_high = m.spent(high);
    // Where both prices buy the same, so do all between them.
    for (int round = 0; round < 5 && at_low != at_high; ++round) {
        // Of eight prices, those that ask for too much are the first ones; the last is none of them.
        int64_t stride = (high - low) / 8 + 1, too_low = 0;
        for (int k = 4; k; k /= 2) {
            int64_t tried = low + stride * (too_low + k);
            tried = tried < high ? tried : high;
            int64_t spent = m.spent(tried);
            if (spent > room) too_low += k, at_low = spent;
            else at_high = spent;
        }
        int64_t next = low + stride * (too_low + 1);
        low = low + stride * too_low < high ? low + stride * too_low : high;
        high = next < high ? next : high;
    }
    int64_t *cuts = a.cuts + from, *more = a.more + from;
    FOR_EACH_PART(i, m.lists) {
        cuts[i] = m.bought(i, double_of_bits(high));
        more[i] = m.bought(i, double_of_bits(low)) - cuts[i];
    }
    int64_t left = room - at_high;
    synchronize();
    if (!is_speaker()) return;
    add_what_fits(m, cuts, more, left);
    if (!a.is_shared) spend_change(m, cuts, room);
}

INLINE Ahead ahead_of(const Arguments&, int64_t) { return {}; }

KERNEL(fill, Arguments, fill_at, ahead_of)
