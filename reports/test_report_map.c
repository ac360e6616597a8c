/* Maps from records: drawn with the edges of segments, told in words; what is no map is passed over. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

#include "report_map.h"

static char *text;

/* How many maps; `text`: their drawings. */
static int draw(const char *json, const char *line) {
    cJSON *o = cJSON_Parse(json);
    dkv_picture *list = NULL;
    int n = 0;
    size_t size = 0;
    assert_non_null(o);
    assert_int_equal(dkv_readPictures(o, &list, &n), 0);
    free(text);
    text = NULL;
    FILE *f = open_memstream(&text, &size);
    dkv_drawPictures(list, n, line, f);
    fclose(f);
    free(list);
    cJSON_Delete(o);
    return n;
}

static void assertSays(const char *words) {
    if (!strstr(text, words)) fail_msg("not there: %s\n%s", words, text);
}

#define MAP(rows, columns, cells) "{\"rows\":" rows ",\"columns\":" columns ",\"cells\":\"" cells "\"}"
#define TILES(list) "{\"tile\":64,\"first_segment\":0,\"tiles\":[" list "]}"
#define HEADS(n) "{\"tile\":1,\"heads\":[" n "]}"

static void edges_and_words(void **state) {
    (void)state;
    assert_int_equal(draw("{\"tensors\":{\"O\":{\"map\":" MAP(TILES("2,1"), HEADS("2"), "APAPf!") "}},\"weights_forward\":" MAP(
                              TILES("2,1"), TILES("2,1"), "P..PP.hXQ") "}", "shape=100+20 heads=2:2"), 2);
    assertSays("Weights of the forward, by V one-hot: tiles of 64 queries (down) by 64 keys (across). 3 of 6 tiles beyond the bound: "
               "R1 on P0 2 of 2, up to 1.8e+02; R1 on R1 1 of 1, up to 1.3.");
    assertSays("O: tiles of 64 rows by heads. 2 of 6 tiles beyond the bound: R1 2 of 2, not finite.");
    assertSays("<path class=\"m5\"");
    assertSays(">R1</text>");
    assertSays("aria-label=\"O: tiles of 64 rows by heads\"");
    int lines = 0; /* three edges each way, and three of the other map */
    for (const char *s = text; (s = strstr(s, "class=\"seam\"")); s++) lines++;
    assert_int_equal(lines, 9);
}

static void what_is_no_map_is_passed_over(void **state) {
    (void)state;
    static const char *const bad[] = {
        MAP(TILES("2"), HEADS("2"), "AAA"),                   /* too few cells */
        MAP(TILES("2"), HEADS("2"), "AAAAA"),                 /* too many */
        MAP(TILES("99"), HEADS("1"), "A"),                    /* too large */
        MAP(TILES("20,21"), HEADS("1"), "A"),                 /* in sum */
        MAP(TILES("-1"), HEADS("1"), ""), MAP(TILES("\"2\""), HEADS("1"), "AA"), MAP(TILES("[2]"), HEADS("1"), "AA"),
        MAP(TILES("1e999"), HEADS("1"), "A"), MAP(TILES(""), HEADS("1"), ""), MAP(TILES("0"), HEADS("1"), ""),
        MAP("{\"tile\":\"nan\",\"tiles\":[1]}", HEADS("1"), "A"), MAP("{\"tile\":64,\"first_segment\":-1,\"tiles\":[1]}", HEADS("1"), "A"),
        MAP("{\"tile\":64,\"first_segment\":1e300,\"tiles\":[1]}", HEADS("1"), "A"), MAP("7", "null", "A"), "[]", "7", "\"x\"", "{}"};
    char json[500];
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        snprintf(json, sizeof json, "{\"tensors\":{\"O\":{\"map\":%s}},\"weights_backward\":%s}", bad[i], bad[i]);
        if (draw(json, "shape=9") != 0) fail_msg("taken for a map: %s", bad[i]);
    }
    assert_int_equal(draw("{\"tensors\":[1,{\"map\":3}]}", "shape=9"), 0);
}

/* Letters that are none, segments beyond the shape, a tile of 1e15: drawn, and nothing breaks. */
static void odd_maps(void **state) {
    (void)state;
    assert_int_equal(draw("{\"tensors\":{\"dQ\":{\"map\":" MAP("{\"tile\":1e15,\"first_segment\":900,\"tiles\":[1,0,1]}", HEADS("2"),
                                                                "<z\\\"\xc3") "}}}", "shape=9"), 1);
    assertSays("1 of 1 tiles beyond the bound: R900 1 of 1");
    assert_int_equal(draw("{}", "no line at all"), 0);
    assert_string_equal(text, "");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(edges_and_words), cmocka_unit_test(what_is_no_map_is_passed_over),
                                       cmocka_unit_test(odd_maps)};
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    free(text);
    return failed;
}
